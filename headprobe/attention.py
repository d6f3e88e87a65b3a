"""The reference: multi-head attention as the papers write it, plain enough to check by eye.

Every tensor has its axes in one order: batch, heads, then rows (queries or keys), then features.
All functions compute in float32 or better, also under autocast, whatever precision comes in.

References:
    Vaswani et al. 2017, "Attention Is All You Need", eq. 1 and section 3.2.2.
    Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need" (multi-query).
    Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
    Checkpoints" (grouped-query).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

Position = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def attention_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
    """Scaled dot products of every query with every key: Q Kᵀ · scale, before mask and softmax.

    With fewer key heads than query heads, neighbouring query heads share one: head h reads key
    head h // (heads // kv_heads) (Ainslie et al. 2023; one key head: Shazeer 2019).

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, kv_heads, keys, dim].
        scale: factor on the dot products; None means 1/sqrt(dim).

    Returns:
        [batch, heads, queries, keys], float32 or better.

    Raises:
        ValueError: if heads is not a multiple of kv_heads.

    Example:
        >>> query = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])  # 2 heads, 1 query
        >>> key = torch.tensor([[[[2.0, 3.0], [4.0, 5.0]]]])  # 1 key head, 2 keys
        >>> attention_scores(query, key, scale=1.0).tolist()
        [[[[2.0, 4.0]], [[3.0, 5.0]]]]
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key = _at_least_float32(query, key)
    # Scaling the query costs a pass over queries x dim, scaling the scores over queries x keys.
    return _grouped_matmul(query * scale, key.transpose(-2, -1))


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the keys that the mask leaves visible; a row that sees none is all zeros.

    Args:
        scores: [batch, heads, queries, keys].
        mask: broadcastable to the scores. Bool or integer: True or 1 attends, False or 0 is
            hidden. Floating: added to the scores, -inf hides.

    Returns:
        Weights shaped like the scores, float32 or better; each row sums to 1 or is zero.

    Raises:
        ValueError: if the mask doesn't broadcast to the scores, or is an integer mask with
            values other than 0 and 1.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False], [False, False]])
        >>> masked_softmax(torch.zeros(3, 2), mask).tolist()
        [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]
    """
    scores, empty = masked_scores(scores, mask)
    weights = scores.softmax(dim=-1)
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def masked_scores(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores whose softmax the weights are, and the rows that see no key, whose weights are zero.

    Args:
        scores: [batch, heads, queries, keys].
        mask: as in `masked_softmax`.

    Returns:
        The scores with -inf where the mask hides a key, float32 or better, and True for the rows
        that see none, [..., queries, 1], or None without a mask. These rows are open, so that
        neither they nor their gradients become NaN in a softmax.

    Raises:
        ValueError: as `masked_softmax`.

    Example:
        >>> mask = torch.tensor([[True, False], [False, False]])
        >>> scores, empty = masked_scores(torch.zeros(2, 2), mask)
        >>> scores.tolist(), empty.tolist()
        ([[0.0, -inf], [0.0, 0.0]], [[False], [True]])
    """
    (scores,) = _at_least_float32(scores)
    if mask is None:
        return scores, None
    mask = _checked_mask(mask, scores.shape)
    if mask.is_floating_point():
        mask = mask.to(scores.dtype)
        empty = (mask == -torch.inf).all(dim=-1, keepdim=True)
        return scores + mask.masked_fill(empty, 0.0), empty
    empty = ~mask.any(dim=-1, keepdim=True)
    return scores.masked_fill(~(mask | empty), -torch.inf), empty


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """How much each query attends to each key: softmax(Q Kᵀ · scale) (Vaswani et al. 2017, eq. 1).

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, kv_heads, keys, dim]; heads share keys as in `attention_scores`.
        mask: broadcastable to [batch, heads, queries, keys]; the rules are `masked_softmax`'s.
        is_causal: hide key j from query i where j > i, on top of what the mask hides.
        scale: factor on the dot products; None means 1/sqrt(dim).

    Returns:
        [batch, heads, queries, keys], fractions of each query's attention, float32 or better.

    Raises:
        ValueError: if heads is not a multiple of kv_heads, or the mask is not a valid one.

    Example:
        >>> same = torch.ones(1, 1, 2, 4)
        >>> attention_weights(same, same, is_causal=True).tolist()
        [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    scores = attention_scores(query, key, scale=scale)
    mask = None if mask is None else _checked_mask(mask, scores.shape)
    if is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        mask = _hide_later_keys(mask, rows, scores.shape[-1])
    return masked_softmax(scores, mask)


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """What each head reads: its weights times the values (Vaswani et al. 2017, eq. 1).

    Args:
        weights: [batch, heads, queries, keys].
        value: [batch, kv_heads, keys, dim]; heads share values as they share keys.

    Returns:
        [batch, heads, queries, dim], float32 or better.

    Raises:
        ValueError: if heads is not a multiple of kv_heads.

    Example:
        >>> weights = torch.tensor([[[[0.5, 0.5]], [[1.0, 0.0]]]])  # 2 heads, 1 query
        >>> value = torch.tensor([[[[2.0], [4.0]]]])  # 1 value head, 2 keys
        >>> weighted_values(weights, value).tolist()
        [[[[3.0]], [[2.0]]]]
    """
    return _grouped_matmul(*_at_least_float32(weights, value))


def rotary(base: float = 10000.0) -> Position:
    """Rotary position embedding: turns feature pairs by an angle that grows with the position.

    Feature i is paired with feature i + dim/2 (the "rotate half" layout of Llama); pair i turns
    by position · base^(-2i/dim) radians. Positions count from 0.

    Args:
        base: the slowest pair turns about 1/base radians per position.

    Returns:
        A function on query and key, [batch, heads, length, dim] each, that returns both turned.
        It raises ValueError if the lengths differ or dim is odd.

    Reference:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 34.

    Example:
        >>> ones = torch.ones(1, 1, 2, 2)
        >>> query, _ = rotary()(ones, ones)  # at position 1: cos 1 - sin 1, cos 1 + sin 1
        >>> [[round(feature, 4) for feature in row] for row in query[0, 0].tolist()]
        [[1.0, 1.0], [-0.3012, 1.3818]]
    """
    if base <= 0:
        raise ValueError(f"base must be positive, got {base}")
    # A partial, not a closure: modules that hold it can be pickled.
    return partial(_rotate, base=base)


class MultiHeadAttention(nn.Module):
    """Multi-head attention: self, cross or causal, with full, grouped or single key heads.

    x is projected by `w_q`, the context by `w_k` and `w_v`; the feature axis is split into heads;
    each head attends; the heads are concatenated and projected by `w_o` (Vaswani et al. 2017,
    section 3.2.2).

    Args:
        d_model: features of x, of the context and of the output.
        n_heads: query heads.
        n_kv_heads: key and value heads. None: as many as query heads (Vaswani et al. 2017); 1:
            multi-query (Shazeer 2019); between: grouped-query (Ainslie et al. 2023).
        head_dim: features per head; None means d_model / n_heads.
        bias: whether the four projections have a bias.
        dropout: fraction of the weights set to zero in training mode.
        norm_before_output: LayerNorm over the concatenated heads, before `w_o`.
        position: turns query and key, [batch, heads, length, head_dim] each, into ones that know
            their positions, for example `rotary()`.

    Raises:
        ValueError: if a size is not positive, d_model is not a multiple of n_heads (with head_dim
            None), or n_heads is not a multiple of n_kv_heads.

    Example:
        >>> attention = MultiHeadAttention(8, 4, n_kv_heads=2)
        >>> output, weights = attention(torch.randn(1, 5, 8), return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 4, 5, 5]))
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        norm_before_output: bool = False,
        position: Position | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        _check_positive(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads)
        if head_dim is None:
            _check_multiple("d_model", d_model, "n_heads", n_heads)
            head_dim = d_model // n_heads
        _check_positive(head_dim=head_dim)
        _check_multiple("n_heads", n_heads, "n_kv_heads", n_kv_heads)
        self.d_model, self.head_dim = d_model, head_dim
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.w_q = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.w_k = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.w_v = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.w_o = nn.Linear(n_heads * head_dim, d_model, bias=bias)
        self.norm = nn.LayerNorm(n_heads * head_dim) if norm_before_output else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.position = position

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        return_weights: bool = False,
        block_size: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to itself, or to the context.

        Args:
            x: [batch, queries, d_model].
            context: [batch, keys, d_model] for cross-attention; None for self-attention.
            mask: [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys], axes of
                size 1 allowed; the rules are `masked_softmax`'s.
            is_causal: hide key j from query i where j > i, on top of what the mask hides.
            return_weights: also return the weights, as they are before dropout.
            block_size: queries attended at a time, so that the queries x keys map is never made.
                Where gradients are recorded, autograd keeps the weights of every block.

        Returns:
            The output, shape and dtype of x; with return_weights, (output, weights), the weights
            [batch, heads, queries, keys] in float32 or better.

        Raises:
            ValueError: if a shape or mask does not fit, block_size is not positive, or block_size
                and return_weights are both given.
        """
        context = x if context is None else context
        self._check_inputs(x, context)
        queries = x.shape[1]
        if block_size is None:
            block_size = max(queries, 1)
        elif return_weights:
            raise ValueError("return_weights makes the map that block_size avoids: drop one")
        _check_positive(block_size=block_size)
        query, key = self._split(self.w_q(x)), self._split(self.w_k(context))
        value = self._split(self.w_v(context))
        if self.position is not None:
            query, key = self.position(query, key)
        if mask is not None:
            mask = mask[:, None] if mask.dim() == 3 else mask[(None,) * (2 - mask.dim())]
            mask = _checked_mask(mask, (*query.shape[:3], key.shape[2]))

        positions = torch.arange(queries, device=x.device)
        reads = []
        for start in range(0, max(queries, 1), block_size):
            rows = slice(start, start + block_size)
            visible = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
            if is_causal:
                visible = _hide_later_keys(visible, positions[rows], key.shape[2])
            weights = attention_weights(query[:, :, rows], key, visible)
            reads.append(weighted_values(self.dropout(weights), value))
        read = torch.cat(reads, dim=2) if len(reads) > 1 else reads[0]
        concatenated = read.transpose(1, 2).flatten(2).to(value.dtype)
        output = self.w_o(self.norm(concatenated)).to(x.dtype)
        return (output, weights) if return_weights else output

    def _split(self, projected: Tensor) -> Tensor:
        """[batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        # Only the feature axis is cut: a view straight to the target shape would mix positions.
        batch, length, features = projected.shape
        heads = features // self.head_dim
        return projected.view(batch, length, heads, self.head_dim).transpose(1, 2)

    def _check_inputs(self, x: Tensor, context: Tensor) -> None:
        for name, given in (("x", x), ("context", context)):
            if given.dim() != 3 or given.shape[-1] != self.d_model:
                raise ValueError(
                    f"{name} must be [batch, length, d_model] with d_model = {self.d_model}, "
                    f"got {tuple(given.shape)}"
                )
        if len(x) != len(context):
            raise ValueError(f"x has {len(x)} sequences, context {len(context)}: must be equal")


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, m, k] x [batch, kv_heads, k, n] to [batch, heads, m, n]."""
    (batch, heads, rows, inner), kv_heads = left.shape, right.shape[1]
    _check_multiple("heads", heads, "kv_heads", kv_heads)
    # The rows of the heads that share a key head are stacked: one matmul, and no repeated keys.
    stacked = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    device_type = left.device.type
    known = torch.amp.is_autocast_available(device_type)  # the meta device, for one, is not
    with torch.autocast(device_type, enabled=False) if known else nullcontext():
        product = stacked @ right
    return product.reshape(product.shape[0], heads, rows, right.shape[-1])


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _checked_mask(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask as bool or float, or an error if it doesn't broadcast to the shape."""
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > len(shape) or any(size not in (1, target) for size, target in sizes):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to the scores' shape "
            f"{tuple(shape)}; give a padding mask [batch, keys] as mask[:, None, None, :]"
        )
    if mask.is_floating_point() or mask.dtype == torch.bool:
        return mask
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"an integer mask holds 1 (attends) and 0 (hidden) only, got values from "
            f"{int(mask.min())} to {int(mask.max())}; a mask to be added must be floating"
        )
    return mask.bool()


def _hide_later_keys(mask: Tensor | None, rows: Tensor, keys: int) -> Tensor:
    """The mask, and key j hidden from the queries at positions `rows` where j is later."""
    past = torch.arange(keys, device=rows.device) <= rows[:, None]
    if mask is None:
        return past
    return torch.where(past, mask, -torch.inf) if mask.is_floating_point() else mask & past


def _rotate(query: Tensor, key: Tensor, *, base: float) -> tuple[Tensor, Tensor]:
    length, dim = query.shape[-2:]
    if key.shape[-2] != length:
        raise ValueError(
            f"rotary needs as many keys as queries, got {key.shape[-2]} keys and {length} queries"
        )
    if dim % 2:
        raise ValueError(f"rotary turns pairs of features: dim must be even, got {dim}")
    halves = torch.arange(0, dim, 2, dtype=torch.float32, device=query.device) / dim
    angles = torch.arange(length, device=query.device)[:, None] / base**halves
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))

    def turn(features: Tensor) -> Tensor:
        first, second = features.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return features * cos.to(features.dtype) + turned * sin.to(features.dtype)

    return turn(query), turn(key)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_multiple(name: str, number: int, of_name: str, of_number: int) -> None:
    if number % of_number:
        raise ValueError(f"{name} ({number}) must be a multiple of {of_name} ({of_number})")
