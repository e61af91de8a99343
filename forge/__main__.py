import sys

from forge.cli import main

if __name__ == "__main__":  # child processes of a live run import this module again
    sys.exit(main())
