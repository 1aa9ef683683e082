"""How much of JSON Schema is enforced: the schemas of the JSON Schema Test Suite, with and without `strict`.

    python tests/bench/schema_suite.py SUITE/tests/draft2020-12

The suite is at https://github.com/json-schema-org/JSON-Schema-Test-Suite, and in the source archive of the
package jsonschema. Each of its schemas comes with instances that are valid or not. A schema is all right if
every valid instance can be written and no other one can. A schema that is refused is counted as such. Objects
are open here, as the suite means them (`disable_additional_properties: false`).
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from llguidance import LLMatcher, LLTokenizer  # noqa: E402

from engine_core.grammar.llguidance_matcher import LIMITS, llguidance_grammar  # noqa: E402
from server.errors import BadRequest  # noqa: E402
from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams, build_grammar  # noqa: E402  # noqa: E402


def built(schema: Any, *, strict: bool) -> AnswerGrammar | None:
    params = StructuredOutputsParams(json=schema, disable_additional_properties=False)
    try:
        return build_grammar(AskedForm(params, "schema", strict=strict), {})
    except BadRequest:
        return None


def writes(grammar: AnswerGrammar, instance: object, tokenizer: LLTokenizer) -> bool:
    """Whether the grammar allows this instance as an answer."""
    matcher = LLMatcher(tokenizer, llguidance_grammar(grammar.kind, grammar.text), limits=LIMITS, log_level=0)
    text = json.dumps(instance, ensure_ascii=False)
    return all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()


def verdict(group: dict[str, Any], tokenizer: LLTokenizer, *, strict: bool) -> str:
    schema = group["schema"]
    if not isinstance(schema, dict):
        return "no object"
    grammar = built(schema, strict=strict)
    if grammar is None:
        return "refused"
    wrong = {
        test["valid"] for test in group["tests"] if writes(grammar, test["data"], tokenizer) != test["valid"]
    }
    told = ", told" if grammar.ignored else ""
    if not wrong:
        return f"all right{told}"
    return f"accepts invalid{told}" if False in wrong else f"refuses valid{told}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--list", action="store_true", help="name every schema that is not all right")
    args = parser.parse_args()
    tokenizer = LLTokenizer("byte")
    for strict in (False, True):
        counts = Counter[str]()
        for path in sorted(args.suite.glob("*.json")):
            for group in json.loads(path.read_text()):
                found = verdict(group, tokenizer, strict=strict)
                counts[found] += 1
                if args.list and not found.startswith(("all right", "no object")):
                    print(f"  {path.stem}: {group['description']}: {found}")
        total = counts.total() - counts.pop("no object", 0)
        print(f"strict: {strict}; {total} schemas")
        for what, count in counts.most_common():
            print(f"  {count:4}  {count / total:6.1%}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
