"""Attributes that SGLang's test kits (`sglang.test.kits`) need on a test class, for servers of this suite."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
import requests
from transformers import AutoTokenizer

from benchmarks.harness.launch import Server


@dataclass(frozen=True)
class KitProcess:
    """A server's process with the method of `subprocess.Popen` that kits call."""

    process: psutil.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """None while it runs."""
        running = self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        return None if running else 1


def pool_flags(request: pytest.FixtureRequest, kv_bytes: str) -> tuple[str, ...]:
    """Flags of the pool that --kit-pool names, both with the same KV bytes."""
    return ("--kv-pool", request.config.getoption("kit_pool"), "--kv-bytes", kv_bytes, "--enable-cache-report")


def use_server(kit: type, server: Server, model: Path) -> None:
    """Set the attributes that kits read."""
    kit.base_url, kit.process = server.url, KitProcess(server.process)
    kit.model = kit.served_model_name = str(model)
    kit.api_key = "none"
    kit.tokenizer = kit._tokenizer = AutoTokenizer.from_pretrained(model)
    kit.client = openai.Client(api_key="none", base_url=f"{server.url}/v1")
    requests.post(f"{server.url}/flush_cache", params={"timeout": 30}).raise_for_status()


def conversations(folder: Path) -> Path:
    """Write pieces of our pages as conversations of two turns, in the shape of ShareGPT, which kits would download."""
    pages = [page.read_text() for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))]
    turns = [
        {"conversations": [{"from": "human", "value": page[:600]}, {"from": "gpt", "value": ""}]} for page in pages
    ]
    path = folder / "conversations.json"
    path.write_text(json.dumps(turns))
    return path
