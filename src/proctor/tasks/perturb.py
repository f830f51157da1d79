"""Perturbed instructions: the same task in other words or another form, by rules that a seed drives.

What a perturbation must keep is the meaning. So code is never touched (fenced or indented blocks, text in backticks or
quotes), nor any word with a digit or a sign in it, nor numbers; words are replaced only from a closed list, and only
the order of unordered lists changes.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEPT = re.compile(
    r"^```.*?^```[^\n]*$|^~~~.*?^~~~[^\n]*$|^(?: {4}|\t)[^\n]*$|``.+?``|`[^`\n]+`|"
    r"\"[^\"\n]+\"|“[^”\n]+”|'[^'\n]{2,}'(?!\w)|<[^>\n]+>|\[[^\]\n]*\]\([^)\n]*\)|"
    r"\S*(?:://|[/\\_=@#$%^&*{}\[\]|<>~+]|\d)\S*",
    re.MULTILINE | re.DOTALL,
)
"""What is never touched. Anything else is prose."""
_WORD = re.compile(r"(?<![\w.-])[A-Za-z]+(?![\w-]|\.\w)")
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the this that these those of in on at to for from with without by as and or but if so which who it its "
        "is are was be been has have had do does did must should can could will would may not no all any each every "
        "when where there then than also only into your you other same",
    )
)
"""Words whose case carries no meaning: names, commands and constants are not among them."""
_SWAPS: tuple[tuple[str, str], ...] = (
    ("do not", "don't"),
    ("does not", "doesn't"),
    ("is not", "isn't"),
    ("are not", "aren't"),
    ("must not", "mustn't"),
    ("should not", "shouldn't"),
    ("cannot", "can't"),
    ("it is", "it's"),
    ("there is", "there's"),
    ("that is", "that's"),
    ("for example", "for instance"),
    ("in order to", "so as to"),
    ("at the moment", "at present"),
    ("as well as", "and also"),
    ("make sure that", "see to it that"),
    ("make sure", "be certain"),
    ("has to", "needs to"),
    ("have to", "need to"),
    ("go on", "continue"),
    ("instead of", "in place of"),
    ("because of", "owing to"),
    ("whole", "entire"),
    ("wrong", "incorrect"),
    ("fix", "repair"),
    ("create", "make"),
)
_NO_WAY_BACK = frozenset({"make", "continue", "repair", "need to", "needs to"})
"""Words of the right column that mean more than those of the left; they are put in, never taken out."""
_POLITE = ("Please do the following.", "Here is what needs doing.", "Your task is described below.")
_IRRELEVANT = (
    "Unrelated to this task: the office kitchen is closed on Friday afternoons.",
    "By the way, the team meets on the second floor this week; that has nothing to do with this task.",
    "As a side remark that changes nothing here: the newsletter goes out on Mondays.",
    "The parking lot is being repainted, which does not concern this task.",
    "Somebody left an umbrella at the front desk. It has no bearing on what follows.",
)


def perturb(instruction: str, kinds: tuple[str, ...], seed: int) -> str:
    """The instruction after each of `kinds` in turn. The same seed gives the same text. It may come out unchanged when
    a rule finds nothing to work on."""
    for kind in kinds:
        instruction = KINDS[kind](instruction, random.Random(f"proctor-perturb-1:{kind}:{seed}"))
    return instruction


def check_kinds(text: str) -> tuple[str, ...]:
    """`case,noise` as its kinds. Raises ConfigError naming one that is not known."""
    kinds = tuple(part.strip() for part in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"{kind!r} is no perturbation", field="--perturb", remedy=f"of {', '.join(KINDS)}")
    if len(set(kinds)) < len(kinds):
        raise ConfigError("names one kind twice", field=f"--perturb {text}")
    return kinds


def can_change(instruction: str, kinds: tuple[str, ...]) -> bool:
    """Whether any of a few seeds gives another text; else the task is no subject for these perturbations."""
    return any(perturb(instruction, kinds, seed) != instruction for seed in range(8))


def _whitespace(text: str, draw: random.Random) -> str:
    """Double spaces between words, spaces at ends of lines, empty lines more."""

    def prose(part: str) -> str:
        part = re.sub(r"(?<=\S) (?=\S)", lambda _: "  " if draw.random() < 0.15 else " ", part)
        part = re.sub(r"(?<=\S)\n(?=\S)", lambda _: " \n" if draw.random() < 0.3 else "\n", part)
        return re.sub(r"\n\n", lambda _: "\n\n\n" if draw.random() < 0.4 else "\n\n", part)

    changed = _on_prose(text, prose)
    return changed if changed != text else f"{text}\n"


def _case(text: str, draw: random.Random) -> str:
    """Function words in capitals, and sentences that begin with a small letter."""

    def word(found: re.Match[str]) -> str:
        one = found.group()
        if one.lower() not in _FUNCTION_WORDS or draw.random() >= 0.3:
            return one
        return one.upper() if one.islower() else one.lower() if one.istitle() else one

    return _on_prose(text, lambda part: _WORD.sub(word, part))


def _paraphrase(text: str, draw: random.Random) -> str:
    """Contractions and synonyms from a closed list, and a polite opening."""
    table = {one: other for one, other in _SWAPS}
    table |= {other: one for one, other in _SWAPS if other not in _NO_WAY_BACK}
    longest_first = sorted(table, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w'.-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w'-]|\.\w)", re.IGNORECASE)

    def swap(found: re.Match[str]) -> str:
        old = found.group()
        if draw.random() < 0.25 or old.isupper():
            return old
        new = table[old.lower()]
        return new[:1].upper() + new[1:] if old[:1].isupper() else new

    return f"{draw.choice(_POLITE)}\n\n{_on_prose(text, lambda part: pattern.sub(swap, part))}"


def _noise(text: str, draw: random.Random) -> str:
    """One or two remarks that have nothing to do with the task, before and after it."""
    first, second = draw.sample(_IRRELEVANT, 2)
    before = draw.random() < 0.5
    after = not before or draw.random() < 0.5
    return (f"{first}\n\n" if before else "") + text.rstrip("\n") + (f"\n\n{second}\n" if after else "\n")


def _order(text: str, draw: random.Random) -> str:
    """The items of each unordered list in another order. Numbered lists and running text stay as they are."""
    lines = text.splitlines(keepends=True)
    fenced = False
    start = 0
    while start < len(lines):
        fenced ^= lines[start].lstrip().startswith(("```", "~~~"))
        mark = None if fenced else re.match(r"([-*+]) +\S", lines[start])
        if mark is None:
            start += 1
            continue
        items: list[list[str]] = []
        end = start
        while end < len(lines) and (lines[end].startswith(f"{mark.group(1)} ") or re.match(r"[ \t]+\S", lines[end])):
            if lines[end].startswith(f"{mark.group(1)} "):
                items.append([])
            items[-1].append(lines[end] if lines[end].endswith("\n") else f"{lines[end]}\n")
            end += 1
        shuffled = draw.sample(items, len(items))
        lines[start:end] = [line for item in shuffled for line in item]
        start = end
    return "".join(lines)


def _on_prose(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` made to each stretch of prose; what `_KEPT` finds stays byte for byte."""
    parts, at = [], 0
    for kept in _KEPT.finditer(text):
        parts += [change(text[at : kept.start()]), kept.group()]
        at = kept.end()
    return "".join([*parts, change(text[at:])])


KINDS: Mapping[str, Callable[[str, random.Random], str]] = {
    "whitespace": _whitespace,
    "case": _case,
    "paraphrase": _paraphrase,
    "noise": _noise,
    "order": _order,
}
"""Every kind of perturbation, by name."""
