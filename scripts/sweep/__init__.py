"""What headprobe makes of every model type that transformers has; see __main__.py."""
