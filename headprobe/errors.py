"""What headprobe raises when it can't do what was asked."""


class HeadprobeError(Exception):
    """A request that can't be met; the message says what was expected, what came, what to do."""


class NoAttentionError(HeadprobeError):
    """The model ran and no attention map could be captured."""
