"""Upload a file, analyse it in a sandbox, and save the table and the figure that the code wrote.

python analyse_upload.py FILE.csv COLUMN [OUT]
"""

import sys
from pathlib import Path

from sbx import Sandbox

CODE = """
import pandas as pd, matplotlib.pyplot as plt
table = pd.read_csv({path!r})
counts = table[{column!r}].value_counts()
counts.to_csv("counts.csv")
counts.plot.bar()
plt.savefig("counts.png")
counts
"""


def main(file: Path, column: str, out: Path) -> None:
    with Sandbox("data-science") as box:
        upload = box.uploads.put(file)
        run = box.run(CODE.format(path=upload.path, column=column))
        if run.error is not None:
            sys.exit(f"{run.error.name}: {run.error.value}")
        print(run.result)
        out.mkdir(exist_ok=True)
        for name in ("counts.csv", "counts.png"):
            (out / name).write_bytes(box.files.read_bytes(name))
            print("saved", name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3] if len(sys.argv) > 3 else "out"))
