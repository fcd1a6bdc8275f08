"""Fuzz one target with atheris until the time is over or it fails: scripts/fuzz calls this.

    python -m tests.fuzz TARGET SECONDS DIRECTORY [option of libFuzzer …]

What is found to reach something new is kept in DIRECTORY, from which the next call goes on; an
input that makes the target fail is left there as `crash-…`.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["sbx.kernels", "sbx.workspace", "sbx.policy", "sbx.guest", "tests.fuzz"]
):
    from tests.fuzz.targets import SEEDS, TARGETS, WORDS


def main(name: str, seconds: str, directory: str, *options: str) -> None:
    corpus = Path(directory) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = Path(directory) / f"{name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS[name]))
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-dict={words}",
        f"-artifact_prefix={directory}/{name}-",
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-timeout=10",  # seconds for one input
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        *options,
    ]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(
        char if char.isalnum() or char == "_" else f"\\x{byte:02x}"
        for char in word
        for byte in char.encode()
    )


main(*sys.argv[1:])
