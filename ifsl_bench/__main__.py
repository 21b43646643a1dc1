"""``python -m ifsl_bench`` is ``ifsl-bench``."""

from ifsl_bench.cli.main import main

if __name__ == "__main__":
    main()
