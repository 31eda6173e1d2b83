"""Prints the answers to `.github/ISSUE_TEMPLATE/gpu-result.yml`, each below its label.

make bench-gpu 2>&1 | tee build/printed.txt; python -m benchmarks.form build/printed.txt
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu-result.yml"


def labels():
    """Returns the label of each field of the form, by its id."""
    field = r"id: (\w+)\n +attributes:\n +label: (.+)"
    return dict(re.findall(field, FORM.read_text("utf-8")))


def answers(printed):
    """Returns the answer to each field, from what `make bench-gpu` printed."""
    files = re.findall(r"^Wrote (.+\.json)$", printed, re.MULTILINE)
    driver = shutil.which("nvidia-smi")
    query = "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"
    # Without the lines that told of the progress.
    shown = re.sub(r"^ *\d+% .*\n", "", printed, flags=re.MULTILINE)
    return {
        "card": output_of(driver, *query) if driver else "",
        "printed": shown.replace(f"{ROOT}/", "").strip(),
        "info": output_of(sys.executable, "-m", "keras_lso", "info"),
        "results": "\n\n".join(map(block, map(pathlib.Path, files))),
    }


def block(path):
    """Returns a file of results as Markdown."""
    text = json.dumps(json.loads(path.read_text("utf-8")), separators=(",", ":"))
    return f"{path.name}\n```json\n{text}\n```"


def output_of(*command):
    """Returns what a command prints."""
    return subprocess.check_output(command, text=True, cwd=ROOT).strip()


def main():
    """Prints the form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("printed", type=pathlib.Path)
    found = answers(parser.parse_args().printed.read_text("utf-8"))
    for key, label in labels().items():
        print(f"### {label}\n\n{found[key]}\n")


if __name__ == "__main__":
    main()
