"""The picture of the report that the README shows.

Command:  python scripts/picture.py [RUN_DIR]        (default: reports/minilm-l6)
Input:    RUN_DIR/report.html, as `headprobe analyze` writes it; Chromium on the PATH
Output:   RUN_DIR.png, beside it: a new run replaces the folder
Time:     a few seconds
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = "1180,1130"


def main(run: Path) -> None:
    """Take the picture."""
    picture = run.with_name(f"{run.name}.png")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            "chromium",
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-quic", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync"),
            f"--user-data-dir={profile}",
            f"--window-size={SIZE}",
            f"--screenshot={picture}",
            (run / "report.html").resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True)
    print(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "reports/minilm-l6"))
