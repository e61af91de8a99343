"""Recipes: how to run an agent program of others on one task. TOML; unknown keys are errors with their path.

Texts may hold `$name` or `${name}`, filled in for every task (`$$` is a dollar):

    $task        what is to be done: the task's system text, if it has one, and its prompt
    $task_json   {"system", "prompt", "tools", "workspace", "max_turns"}: the same apart; schemas of the tools that are
                 to be had at $gateway/tools/NAME; whether the task is about the files of the workspace
    $gateway     http://127.0.0.1:8000, which leads to the gateway and to nothing else
    $base_url    the recipe's `base_url`, filled in
    $trajectory  its name, which the base URL holds
    $key         what to show as an API key
    $model       the model's name
    $program     the folder that the program is installed in
    $drivers     the folder of the drivers that ship
    $home, $workspace   folders of the sandbox
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from forge.faults import explain
from forge.sandbox.base import DOOR, HOME, WORKSPACE, Limits
from forge.scenario import read_toml, scenarios_dir
from forge.sections import Positive, Section, SomeSeconds
from forge.types import ForgeError

#: where `forge blackbox install` puts programs
ENGINES = Path("engines/blackbox")
GATEWAY = f"http://127.0.0.1:{DOOR}"
NAMES = frozenset(
    "task task_json gateway base_url trajectory key model program drivers home workspace".split()  # noqa: SIM905
)
ExitCode = Annotated[int, Field(ge=0, le=255)]
_PATH = re.compile(r"(?!/)(?!.*(^|/)\.\.?(/|$))[^\0]+")


class Exit(Section):
    """What an exit code means. Any other one: the agent crashed, and its trajectory is dead."""

    scored: tuple[ExitCode, ...] = (0,)  # the verifier decides
    failed: tuple[ExitCode, ...] = ()  # reward 0, whatever the verifier would say: it gave up


class Bounds(Section):
    """Of the program with all it starts. Beyond them it is ended, and its trajectory is dead."""

    seconds: SomeSeconds = 300.0
    cpu_seconds: Positive = 300  # of each process
    cores: Annotated[float, Field(gt=0)] = 2.0
    memory_mib: Positive = 2048
    processes: Positive = 256  # and threads
    output_kib: Positive = 256  # kept; who writes 16 times as much is ended
    home_mib: Positive = 256  # files in its home

    def limits(self) -> Limits:
        return Limits(**self.model_dump(exclude={"home_mib"}))


class Recipe(Section):
    """One program. Paths of files are within its home or its workspace."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    program: str | None = None  # a name that `forge blackbox install` knows
    folders: tuple[str, ...] = ()  # more of this machine that it needs, read-only; relative ones from the recipe's file
    base_url: str = "$gateway/t/$trajectory/v1"
    environment: dict[str, str] = Field(default_factory=dict)
    home: dict[str, str] = Field(default_factory=dict)  # files, by path
    workspace: dict[str, str] = Field(default_factory=dict)
    answer: str | None = None  # a file of the workspace that holds its final answer; without it all that it printed
    exit: Exit = Exit()
    limits: Bounds = Bounds()

    @field_validator("home", "workspace")
    @classmethod
    def _within(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if not _PATH.fullmatch(path):
                raise ValueError(f"{path!r}: not a path within the folder")
        return files

    @model_validator(mode="after")
    def _fillable(self) -> Self:
        for where, text in self._texts():
            template = Template(text)
            if not template.is_valid():
                raise ValueError(f"{where}: a lone $; write $$")
            if strangers := sorted(set(template.get_identifiers()) - NAMES):
                raise ValueError(f"{where}: ${strangers[0]} is not known; there are {', '.join(sorted(NAMES))}")
        if self.program is None and self.uses("program"):
            raise ValueError("$program is used; say which in program")
        return self

    def uses(self, name: str) -> bool:
        """Whether `$name` is in any of its texts."""
        return any(name in Template(text).get_identifiers() for _, text in self._texts())

    def _texts(self) -> list[tuple[str, str]]:
        parts = [(f"command.{i}", part) for i, part in enumerate(self.command)] + [("base_url", self.base_url)]
        for table in ("environment", "home", "workspace"):
            parts += [(f"{table}.{key}", text) for key, text in getattr(self, table).items()]
        return parts


class Filled(Section):
    """A recipe for one task."""

    command: tuple[str, ...]
    environment: dict[str, str]
    home: dict[str, str]
    workspace: dict[str, str]


def fill(recipe: Recipe, values: Mapping[str, str]) -> Filled:
    """`values`: all of `NAMES` but those that follow from the recipe and the sandbox."""
    known = {"gateway": GATEWAY, "home": HOME, "workspace": WORKSPACE, **values}
    known["program"] = str(program_folder(recipe.program)) if recipe.program else ""
    known["drivers"] = str(drivers())
    known["base_url"] = Template(recipe.base_url).substitute(known)

    def filled(table: Mapping[str, str]) -> dict[str, str]:
        return {key: Template(text).substitute(known) for key, text in table.items()}

    command = tuple(Template(part).substitute(known) for part in recipe.command)
    return Filled(
        command=command,
        environment=filled(recipe.environment),
        home=filled(recipe.home),
        workspace=filled(recipe.workspace),
    )


def load(name: str | Path) -> Recipe:
    """A file, or the name of a recipe that ships. Raises ForgeError with a line for every fault."""
    path = find(name)
    data = read_toml(path)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise ForgeError("\n".join(f"{path}: {line}" for _, line in explain(error, data))) from None
    folders = tuple(str((path.parent / folder).absolute()) for folder in recipe.folders)
    return recipe.model_copy(update={"folders": folders})


def shipped() -> dict[str, Path]:
    """Recipes by name."""
    found = {path.stem: path for path in (scenarios_dir() / "blackbox").glob("*.toml")}
    return dict(sorted(found.items()))


def find(name: str | Path) -> Path:
    given = Path(name)
    if given.is_file():
        return given
    known = shipped()
    if given.suffix == "" and given.name in known and given.parent in (Path(), Path("blackbox")):
        return known[given.name]
    raise ForgeError(f"{name}: no such recipe; recipes that ship: {', '.join(known) or 'none'}")


def drivers() -> Path:
    """Programs of a few lines around the frameworks of others."""
    return Path(str(resources.files("forge"))).absolute() / "blackbox" / "drivers"


def program_folder(name: str) -> Path:
    return (ENGINES / name).absolute()


def folders_of(recipe: Recipe) -> tuple[Path, ...]:
    """All of this machine that it needs. Raises ForgeError where one is not there."""
    found = [Path(folder) for folder in recipe.folders]
    if recipe.program:
        folder = program_folder(recipe.program)
        if not folder.is_dir():
            raise ForgeError(f"{recipe.program}: not installed; forge blackbox install {recipe.program}")
        found.append(folder)
    for folder in found:
        if not folder.is_dir():
            raise ForgeError(f"{folder}: no such folder, and the recipe needs it")
    return (*found, drivers()) if recipe.uses("drivers") else tuple(found)
