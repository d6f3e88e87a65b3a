"""`python -m headprobe` is the command `headprobe`."""

from headprobe.cli import main

if __name__ == "__main__":
    main()
