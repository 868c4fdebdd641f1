"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class Folder(click.Path):
    """A path. An empty one (an unset variable in a script) would silently mean the folder that the command runs in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a folder, . for this one", param, ctx)
        return super().convert(value, param, ctx)


data_dir_option = click.option(
    "--data-dir",
    type=Folder(path_type=Path),
    default=None,
    help="The node's folder: identity, state, logs, control socket. [default: $SHOAL_NODE__DATA_DIR or ~/.shoal]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")


def data_dir_of(given: Path | None) -> Path:
    """The folder that --data-dir names, or its default."""
    return (given or Path(os.environ.get("SHOAL_NODE__DATA_DIR") or "~/.shoal")).expanduser()
