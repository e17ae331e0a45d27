"""A chat of four turns. Each turn's prompt starts with all earlier ones, which the server finds in its cache.

python examples/chat.py --url http://127.0.0.1:30000
"""

import sglang as sgl

QUESTIONS = (
    "My name is Ada, I live in Lisbon and I am allergic to peanuts. Suggest something to cook on a rainy evening.",
    "I have rice, spinach, eggs and a lemon. Which of your suggestions works with that?",
    "How long does it take, and what can be prepared in the morning?",
    "Which of the ingredients should I check, given what I told you at the start?",
)


@sgl.function
def chat(s, questions):
    s += sgl.system("You are a patient cook. Answer in one or two sentences.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer {number + 1}", max_tokens=64))


def run() -> sgl.lang.interpreter.ProgramState:
    return chat.run(questions=QUESTIONS, temperature=0)


def main() -> None:
    from connecting import connect

    connect(__doc__)
    state = run()
    for number, question in enumerate(QUESTIONS):
        name = f"answer {number + 1}"
        meta = state.get_meta_info(name)
        print(f"> {question}\n{state[name].strip()}")
        print(f"  ({meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens from the cache)\n")


if __name__ == "__main__":
    main()
