"""``python -m ifsl_bench`` is ``ifsl-bench``."""

from ifsl_bench.cli.main import entry

if __name__ == "__main__":
    entry()
