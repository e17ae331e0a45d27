"""Answers with a form: a date by a regular expression, then a record by a JSON schema.

python examples/constrained.py --url http://127.0.0.1:30000
"""

import json

import sglang as sgl

TEXT = "Departure is on the fourth of May 2031 from Horta, with Ada (36) and Bento (41) on board, both fond of chess. "
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-([0-2][0-9]|3[01])"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["chess", "tea", "rain"]}, "minItems": 1, "maxItems": 2},
        "travels": {"type": "boolean"},
    },
    "required": ["name", "age", "likes", "travels"],
    "additionalProperties": False,
}


@sgl.function
def extract(s, text):
    s += text + "The day of departure is "
    s += sgl.gen("date", max_tokens=16, regex=DATE)
    s += ". The first traveller as JSON: "
    s += sgl.gen("person", max_tokens=160, json_schema=json.dumps(PERSON))


def run() -> sgl.lang.interpreter.ProgramState:
    return extract.run(text=TEXT, temperature=0)


def main() -> None:
    from connecting import connect

    connect(__doc__)
    state = run()
    print("date:  ", state["date"])
    print("person:", json.loads(state["person"]))


if __name__ == "__main__":
    main()
