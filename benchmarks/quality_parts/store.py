"""The file of results: settings, and one entry for every configuration and peer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.multi_turn_parts.errors import SettingsError
from benchmarks.quality_parts.configuration import Configuration


class Results:
    """`served`: what `measured.Measured.result` gave, by configuration; `peers`: kvpress's, by method and share."""

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        self.path, self.settings, self.about = path, settings, about
        self.served: dict[Configuration, dict[str, Any]] = {}
        self.peers: dict[tuple[str, float], dict[str, Any]] = {}

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> Results:
        """The file with what it holds already, or a new one. Raises SettingsError where its settings are others."""
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingsError(f"--output {path}: give a file in a folder that exists")
        if not path.exists():
            return cls(path, settings, about)
        found = cls.load(path)
        if found.settings != settings:
            changed = sorted(name for name in settings if found.settings.get(name) != settings[name])
            raise SettingsError(f"{path} holds results of another {', '.join(changed)}: choose another --output")
        return found

    @classmethod
    def load(cls, path: Path) -> Results:
        """A file to read from. Raises SettingsError when it is none of this benchmark's."""
        try:
            document = json.loads(path.read_text())
            found = cls(path, document["settings"], document["about"])
            for entry in document["served"]:
                found.served[Configuration(**entry["configuration"])] = entry["result"]
            for entry in document["peers"]:
                found.peers[entry["method"], entry["share"]] = entry["result"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f"{path} cannot be read as results of benchmarks.quality ({error!r})") from None
        return found

    @property
    def known(self) -> set[Configuration]:
        return set(self.served)

    def add(self, configuration: Configuration, result: dict[str, Any]) -> None:
        """Keep the result of a server; it is on disk when this returns."""
        self.served[configuration] = result
        self.write()

    def add_peer(self, method: str, share: float, result: dict[str, Any]) -> None:
        """Keep the result of a peer; it is on disk when this returns."""
        self.peers[method, share] = result
        self.write()

    def write(self) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(self.text())
        beside.replace(self.path)

    def text(self) -> str:
        document = {
            "settings": self.settings,
            "about": self.about,
            "served": [{"configuration": asdict(one), "result": result} for one, result in self.served.items()],
            "peers": [{"method": m, "share": s, "result": result} for (m, s), result in self.peers.items()],
        }
        return json.dumps(document, indent=1) + "\n"
