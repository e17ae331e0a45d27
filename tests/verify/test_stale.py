"""After weights were updated, the table says that profile and reference are those of the first ones."""

import pytest

from sgl_ragged.verify.command import table
from sgl_ragged.verify.comparison import compare
from sgl_ragged.verify.profile_reference import ProfileReference
from tests.profiles.test_reference import make_text
from tests.serve.test_start_check import Echo


class Updated(Echo):
    def __init__(self, texts, updates: int) -> None:
        super().__init__(texts)
        self.updates = updates

    def info(self):
        return super().info() | {"internal_states": [{"ragged": {"weight_updates": self.updates}}, {}]}


@pytest.mark.parametrize("updates", [0, 2])
def test_updates_are_in_the_table(updates):
    texts = (make_text("prose", 700, 443),)
    reference = ProfileReference(texts, 256, "p")
    found = compare(Updated(texts, updates), reference, reference.prompts)
    assert found.weight_updates == updates
    assert ("Stale: weights were updated 2 times" in table(found)) == (updates == 2)
