"""``python -m typax``: the command line."""

from typax.cli import main

if __name__ == "__main__":
    main(prog_name="typax")
