"""An answer printed while it is generated.

python examples/streaming.py --url http://127.0.0.1:30000
"""

from collections.abc import Callable

import sglang as sgl

QUESTION = "Describe the harbour of a small island at six in the morning, in winter, for someone who has never seen it."


@sgl.function
def describe(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=96))


def run(piece: Callable[[str], object] = lambda _: None) -> sgl.lang.interpreter.ProgramState:
    """Calls `piece` with every piece of the answer as it comes."""
    state = describe.run(question=QUESTION, temperature=0, stream=True)
    for text in state.text_iter("answer"):
        piece(text)
    state.sync()
    return state


def main() -> None:
    from connecting import connect

    connect(__doc__)
    run(lambda text: print(text, end="", flush=True))
    print()


if __name__ == "__main__":
    main()
