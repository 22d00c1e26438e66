"""Grammars of outputs, compiled by llguidance within limits for untrusted ones.

The HTTP process compiles a grammar to reject an invalid one. The engine core compiles it again with
the model's tokens, in a thread.
"""

from __future__ import annotations

from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["compile_grammar", "grammar_problem", "json_grammar"]

# A tenth of the defaults, so that no step of the parser takes more than some milliseconds.
_INITIAL_FUEL: Final = 500_000
_GRAMMAR_SYMBOLS: Final = 100_000
_LEXER_STATES: Final = 25_000
_STEP_ITEMS: Final = 20_000
# The default permits white space without end, which small models produce.
_WHITE_SPACE: Final = r"[ \n\t]{0,16}"
_MAX_DETAIL: Final = 200


def json_grammar(schema: str) -> str:
    """Return the grammar of the JSON texts that a schema permits.

    Args:
        schema: a JSON Schema, as a JSON object.

    Raises:
        ValueError: the schema is not a JSON object, or nested too deeply.
    """
    grammar: str = LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    )
    return grammar


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the state of an output before its first token. Its `get_error` names a problem."""
    limits = LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        max_lexer_states=_LEXER_STATES,
        step_max_items=_STEP_ITEMS,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def grammar_problem(grammar: str) -> str | None:
    """Return the reason why a grammar cannot be compiled, in one line; None if it can."""
    # The tokens of a model do not decide if a grammar is valid, so bytes suffice.
    problem: str = compile_grammar(grammar, LLTokenizer("byte")).get_error()
    return " ".join(problem.split())[:_MAX_DETAIL] or None
