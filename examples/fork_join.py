"""One text, three questions about it at the same time, and a summary of the answers.

The forks share the text: it is computed once and its sealed segments are stored once.

python examples/fork_join.py --url http://127.0.0.1:30000
"""

import sglang as sgl

REPORT = (
    "The ferry left Horta at seven with forty passengers, two horses and the mail. Off Pico the wind turned to the "
    "north, and the captain chose to wait in Madalena until noon. One passenger, a geologist, used the hours to look "
    "at the lava fields behind the harbour. When they sailed again the sea was calm, and the mail was a day late."
)
QUESTIONS = ("What happened?", "Who was on board?", "Why was the mail late?")


@sgl.function
def read(s, report, questions):
    s += "Report: " + report + "\n"
    # fork() has the text computed before the forks start only if it has arrived: statements run in the background.
    s.sync()
    forks = s.fork(len(questions))
    for fork, question in zip(forks.states, questions, strict=True):
        fork += "Question: " + question + "\nAnswer: " + sgl.gen("answer", max_tokens=48)
    forks.join()
    for question, answer in zip(questions, s["answer"], strict=True):
        s += question + " " + answer + "\n"
    s += "In one sentence: " + sgl.gen("summary", max_tokens=48)


def run() -> sgl.lang.interpreter.ProgramState:
    return read.run(report=REPORT, questions=QUESTIONS, temperature=0)


def main() -> None:
    from connecting import connect

    connect(__doc__)
    state = run()
    for question, answer in zip(QUESTIONS, state["answer"], strict=True):
        print(f"> {question}\n{answer.strip()}\n")
    print(f"In one sentence: {state['summary'].strip()}")


if __name__ == "__main__":
    main()
