"""The `forge` command. This package alone imports both `sim` and the live parts, and each only when it is asked to.

Child processes of a live run import this module again, so it must stay light.
"""

from __future__ import annotations

import errno
import sys
import traceback

import typer

from forge.types import ForgeError

app = typer.Typer(
    name="forge",
    help="Tune the policies of an agent-RL system in a simulator, deploy them unchanged on a live one, and compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

#: what the file system says of a path somebody gave: too long, no permission, a file for a folder, a full disk
USERS = {
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOSPC,
    errno.EDQUOT,
}


def main() -> int:
    """Exit code 0, 2 for user errors (one clear line each), 1 for our own."""
    try:
        from forge.cli import (  # noqa: F401 - each registers its commands
            bench,
            blackbox,
            calibrate,
            dashboard,
            engine,
            evaluate,
            export,
            formats,
            live,
            quickstart,
            sandbox,
            show,
            simulate,
            tune,
        )

        app()
    except KeyboardInterrupt:  # while modules were imported; later typer says so itself
        print("stopped", file=sys.stderr)
        return 130
    except ForgeError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except SystemExit as left:  # how typer ends every command, and refuses a wrong option (2)
        return int(left.code or 0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in USERS and error.filename is not None:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        traceback.print_exc()
        print("error: this is a fault in Forge; please report it with the lines above", file=sys.stderr)
        return 1
    return 0
