"""A process that holds a sandbox's files: a tmpfs of a fixed size in namespaces of its own.

Nothing of it is seen outside, and no privilege is needed for it: when the holder ends, its mounts and files are gone,
and it ends with whoever opened it, as its standard input then does. A process of root makes it as another user, since
the kernel limits root's processes less.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from forge.sandbox.child import PATH, Child, read
from forge.types import ForgeError

#: what must be installed, and the packages it is in on Debian
PROGRAMS = {"bwrap": "bubblewrap", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
#: of each file system: kernel memory is spent on every file, also on an empty one
MOST_FILES = 16384
#: the user whom a sandbox of root belongs to: nobody
UNPRIVILEGED = 65534
#: in the holder's namespace, where nothing of ours lies and nothing is missed
_AT = "/sys"
_SCRIPT = f"""\
mount -t tmpfs -o size=$1m,nr_inodes={MOST_FILES},mode=0755 tmpfs {_AT} &&
mkdir {_AT}/workspace {_AT}/tmp {_AT}/shm && echo ready && read _"""


def need_programs() -> None:
    """Raises ForgeError where something is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise ForgeError(f"sandbox: not installed: {', '.join(missing)}; apt-get install {packages} (Linux only)")


class Holder:
    """The process, the prefix of commands that run in its namespaces, and its folders there."""

    def __init__(self, child: Child, stdin: int, user: Sequence[str]) -> None:
        self._child = child
        self._stdin = stdin
        self.prefix = [*user, "nsenter", "--preserve-credentials", "-U", "-m", "-t", str(child.number), "--"]

    @staticmethod
    async def start(disk_mib: int, owner: int) -> Holder:
        """`owner`: the user whom commands run as; only root may choose another than itself. Raises ForgeError."""
        need_programs()
        user = (
            [] if os.geteuid() == owner else ["setpriv", "--reuid", f"{owner}", "--regid", f"{owner}", "--clear-groups"]
        )
        there, stdin = os.pipe()
        try:
            child = Child([*user, "unshare", "-Ur", "-m", "sh", "-c", _SCRIPT, "sh", str(disk_mib)], stdin=there)
        finally:
            os.close(there)
        holder = Holder(child, stdin, user)
        try:
            said = await read(child.output)
        except BaseException:
            await holder.end()
            raise
        if said != b"ready\n":
            await holder.end()
            raise ForgeError(
                f"sandbox: no namespace of its own: {said.decode(errors='replace').strip()}; allow unprivileged user "
                "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
                "kernel.apparmor_restrict_unprivileged_userns)"
            )
        return holder

    def path(self, name: str) -> str:
        """Of `workspace`, `tmp` or `shm`, as commands behind `prefix` see it."""
        return f"{_AT}/{name}"

    def open(self, name: str) -> int:
        """The same folder, open here."""
        return os.open(f"/proc/{self._child.number}/root{_AT}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def end(self) -> None:
        await self._child.end()
        os.close(self._child.output)
        os.close(self._stdin)
