"""`sgl-ragged verify` fails where a server is worse than what was measured for its profile."""

import json

import pytest

from sgl_ragged import cli
from sgl_ragged.profiles.quality import MeasuredQuality
from sgl_ragged.verify import command
from sgl_ragged.verify.limits import MAX_KL, allowed_kl
from tests.profiles.test_reference import make_profile, make_text
from tests.serve.test_start_check import Echo

TEXTS = (make_text("prose", 700, 443),)


class Shifted(Echo):
    def info(self):
        return {"ragged": {"segment": 256, "ratio": 0.2}}


def verified(monkeypatch, capsys, path, shift: float, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "RunningServer", lambda url: Shifted(TEXTS, shift))
    monkeypatch.setattr("sys.argv", ["sgl-ragged", "verify", "--url", "u", "--profile", str(path), *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code), capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_the_limit_is_what_was_measured_and_a_quarter(tmp_path, monkeypatch, capsys):
    path = tmp_path / "p.safetensors"
    make_profile(reference=TEXTS).save(path)
    _, out = verified(monkeypatch, capsys, path, 0.02, "--json")
    found = json.loads(out)
    assert (found["measured_kl"], found["max_kl"], found["faults"]) == (None, MAX_KL, [])
    kl = found["mean"]["to_reference"]["kl"]
    assert 0 < kl < MAX_KL
    for measured, status in ((kl, 0), (kl / 1.5, 1)):
        row = MeasuredQuality(0.2, "k6v4", 0.6, measured, 0.0, 0.9, {"prose": measured})
        make_profile(reference=TEXTS, quality=(row,)).save(path)
        found_status, out = verified(monkeypatch, capsys, path, 0.02)
        assert found_status == status
        assert f"Calibration measured KL {measured:.5f} for this profile at ratio 0.2." in out
    assert verified(monkeypatch, capsys, path, 0.02, "--max-kl", "1")[0] == 0


@pytest.mark.parametrize(("measured", "allowed"), [(None, MAX_KL), (0.002, 0.0026), (0.0, 1e-4)])
def test_rounding_is_allowed_where_nothing_is_lost(measured, allowed):
    assert allowed_kl(measured) == pytest.approx(allowed)
