"""`python -m inductor_gqa`: the command line, see inductor_gqa/cli/main.py."""

from inductor_gqa.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
