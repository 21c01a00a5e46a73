"""Where the answer stands in a completion. Text in, text out; every search is linear and bounded."""

from __future__ import annotations

import re
from fractions import Fraction

from sage_lite.errors import UserError

MAX_COMPLETION = 1_000_000  # characters; far beyond any token budget here. Longer ones hold no answer.
MAX_ANSWER = 500  # characters of a mathematical answer
TAIL = 4_000  # where no tag or box shows the answer, only the last characters are searched

_MARKER = re.compile(r"\banswer\b[^.\n$\\0-9]{0,60}?(?:\bis\b|:|=)[:*\s]*", re.IGNORECASE)
# A dollar pair is mathematics only if no space stands inside its ends and no digit follows: "$5 and $7" is money.
_MATHS = r"\$\$.{1,500}?\$\$|\$(?=\S)[^$\n]{1,500}(?<=\S)\$(?!\d)|\\\(.{1,500}?\\\)|\\\[.{1,500}?\\\]"
# [0-9], because \d is every digit of Unicode: "٠" is a zero that no check for "0" sees.
_NUMBER = r"(?<![\w.,])[-−+]?[$€£]?(?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\s?\\?%)?"
_CANDIDATE = re.compile(f"{_MATHS}|{_NUMBER}", re.DOTALL)
_COMPUTED = re.compile(rf"=\s*(?P<value>{_NUMBER})(?!.*=)")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|mathrm|mbox)\s*\{([^{}]*)\}")
_PLAIN = re.compile(
    r"[$€£]? ?(?P<sign>[-+]?) ?[$€£]? ?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?P<point>\.[0-9]+)?"
    r"(?: ?/ ?(?P<below>[0-9]+))?(?P<unit>(?: [A-Za-z]{2,})*)"
)
_SCALES = "hundred thousand million billion trillion dozen mil mn bn".split()
_NO_UNITS = {*_SCALES, *(f"{word}s" for word in _SCALES), "pi", "or", "and", "sqrt", "half", "halves", "squared", "to"}
# What stands behind a number that is only the beginning of the answer. A lone letter is a variable or "thousand", but
# for the units in _GOES_ON's list of letters.
_GOES_ON = re.compile(
    rf"""
    \s*\^(?!\s*\{{?\s*\\circ)                       # 10^6, but 18^\circ is 18
    | \s*[²³¹⁰⁴-⁹¼-¾⅐-⅞] | [.,:]?\d                # 10², 5½, 2:30, 1.5.2, digits of other scripts
    | \{{,\}}\d | \\[!,;]\s*\d | \s+\d+/\d          # 70{{,}}000, 1 1/2
    | \s*\\(?!text|math|mbox|circ|deg|q?quad)[A-Za-z]    # 2\pi
    | [Ee][-+]?\d | (?![mgshlLCF])[A-Za-z](?![A-Za-z])   # 1e3, 5x, 5k
    | [mgshlLCF]\s*[-+*]\s*\d | \s+[xyznkKMB]\b(?!['’&])  # 5m+3, 5 x 3
    | \s*[-+/×÷·⋅−–—]\s*[$€£]?\d | (?:\s+\*\*?\s*|\*\*?)\d  # 10-20, 5 * 3
    | (?i:\s*(?:{"|".join(_SCALES)})s?\b | \s+(?:or|squared|cubed)\b
        | \s+(?:and|plus|minus|times|to)\s+[$€£]?\d | \s+and\s+(?:an?|one|half)\b | \s+to\s+the\s+power\b)
    """,
    re.VERBOSE,
)
# What stands before a number that is only the end, or the inside, of the answer: x^2, x + 3, \sqrt{3}, \frac{1}{2}.
_BEGUN = re.compile(r"(?:\^\s*\{?|\}\s*\{|\\(?:sqrt|[dt]?frac|binom)\s*\{?|\b[A-Za-z](?:\s*[-+/×÷]|\*))\s*$")
_BEFORE = 12  # characters looked at for that
_COMPOUND = re.compile(
    rf"{_NUMBER}\s*(?:[kKMB]\b|(?i:(?:{'|'.join(sorted(_NO_UNITS))})\b|[a-z]+ (?:{'|'.join(_SCALES)})s?\b))"
)


def without_thinking(completion: str) -> str:
    """What follows the last ``</think>``; the whole text if nothing was thought; "" for a thought never closed.

    The opening ``<think>`` may be missing, because some chat templates put it into the prompt. Raises ``UserError``
    if the completion is not a string.
    """
    if not isinstance(completion, str):
        raise UserError(f"a completion must be a string, not {type(completion).__name__}: {completion!r:.80}")
    if len(completion) > MAX_COMPLETION:
        return ""
    _, closed, rest = completion.rpartition("</think>")
    if closed:
        return rest
    return "" if "<think>" in completion else completion


def tagged(text: str) -> str | None:
    """The inside of the last complete ``<answer>…</answer>``, stripped; ``None`` without one."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() if closed and opened else None


def last_line(text: str) -> str:
    """The last line that is not empty, stripped."""
    return text.rstrip().rpartition("\n")[2].strip()


def short_answer(completion: str) -> str:
    """The answer of a task whose answer is one line: what stands in ``<answer>…</answer>``, else the last line.

    Thinking is dropped first (``without_thinking``). A bare answer is its own last line.
    """
    text = without_thinking(completion)
    inside = tagged(text)
    return last_line(text) if inside is None else inside


def boxed(text: str) -> str | None:
    r"""The inside of the last ``\boxed{…}``, braces balanced; ``None`` without one, "" if it is never closed."""
    _, found, rest = text.rpartition(r"\boxed{")
    if not found:
        return None
    depth = 1
    for i, character in enumerate(rest[: MAX_ANSWER + 1]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip()
    return ""


def maths_answer(completion: str) -> str:
    r"""The mathematical answer in a completion, at most ``MAX_ANSWER`` characters; "" if there is none.

    Thinking is dropped (``without_thinking``), then only the last ``<answer>…</answer>`` is read, if there is one. In
    what is left the first of these that exists decides, the last occurrence of it winning: ``\boxed{…}`` or ``####
    …``, whichever comes later; what follows "answer is" or "answer:"; the last line, or the last formula or number in
    it.
    """
    text = without_thinking(completion)
    inside = tagged(text)
    text = text if inside is None else inside
    box, hashes = text.rfind(r"\boxed{"), text.rfind("####")
    if box > hashes:
        found = text[box:]
    elif hashes >= 0:
        found = text[hashes + 4 :].strip().partition("\n")[0]
    else:
        found = _unmarked(text[-TAIL:])
    return bare(found)


def _unmarked(text: str) -> str:
    marked = [text[match.end() :].partition("\n")[0] for match in _MARKER.finditer(text)]
    marked = [rest for rest in marked if _CANDIDATE.search(rest)] or marked
    if marked:
        return _expression(marked[-1], last=False)
    lines = [line for line in text.splitlines() if _CANDIDATE.search(line)]
    return _expression(lines[-1] if lines else last_line(text), last=True)


def _expression(line: str, last: bool) -> str:
    """The first or the last formula or number in a line of text; the result, if the line computes one with ``=``.

    Where it is only a part of a longer answer ("5 million", "10^6", "7 or 8"), all from there to the end of the line.
    """
    candidates = [match.span() for match in _CANDIDATE.finditer(line)]
    prose = _WORD.search(_COMMAND.sub(" ", line))
    if "\\" not in line and not re.search(_MATHS, line) and "=" in line:
        computed = _COMPUTED.search(line)
        if computed:
            candidates, last = [computed.span("value")], False
        elif not prose:
            return line.rpartition("=")[2]
    elif not prose:
        return line
    if not candidates:
        return line
    i = len(candidates) - 1 if last else 0
    while i and _continued(line, candidates[i - 1][1], candidates[i][0]):
        i -= 1
    start, end = candidates[i]
    if _BEGUN.search(line[max(0, start - _BEFORE) : start]):
        return line
    return line[start:] if _GOES_ON.match(line, end) else line[start:end]


def _continued(line: str, end: int, start: int) -> bool:
    """Whether the number that ends at ``end`` goes on up to the next one, which begins at ``start``."""
    match = _GOES_ON.match(line, end)
    return match is not None and (match.end() >= start or not line[match.end() : start].strip(" -+−*/^×÷({"))


def bare(answer: str) -> str:
    r"""An answer without the box, dollars, ``\(…\)``, stars or full stop; "" if that is over ``MAX_ANSWER``."""
    answer = boxed(answer) if r"\boxed{" in answer else answer
    answer = answer.strip().strip("*").strip().removesuffix(".").strip("*").rstrip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) > 2 * len(opening):
            answer = answer[len(opening) : -len(closing)].strip()
            break
    return answer if len(answer) <= MAX_ANSWER else ""


def plain_number(text: str) -> Fraction | None:
    r"""The value of a plain number, exactly; ``None`` for anything else.

    Plain are integers, decimals and ``a/b``, with a sign, thousands commas, a currency sign or a unit in words:
    ``$1,080``, ``-3``, ``72 clips``, ``10,\!080``, ``72\text{ clips}``. Not plain: percentages, formulas, "5
    million", lists.
    """
    match = _PLAIN.fullmatch(_typed(text))
    if not match or not (match["whole"] or match["point"]) or _NO_UNITS & set(match["unit"].lower().split()):
        return None
    if match["below"] and not match["below"].strip("0"):
        return None
    value = Fraction((match["whole"] or "0").replace(",", "") + (match["point"] or "")) / int(match["below"] or 1)
    return -value if match["sign"] == "-" else value


def compound(text: str) -> bool:
    """Whether a text begins with a number that its next word makes another one, or one of several: "5 million", "7 or
    8". No plain number equals it."""
    text = re.sub(r"\\[,;: ]|\\q?quad|[~$]", " ", text)
    return bool(_COMPOUND.match(_typed(re.sub(r"[-{}]", " ", _typed(text)))))


def _typed(text: str) -> str:
    r"""A number in LaTeX as one would type it, with single spaces: ``72\text{ clips}`` is ``72 clips``."""
    text = _TEXT.sub(r" \1", text).replace(r"\$", "$").replace(r"\!", "").replace("{,}", ",").replace("−", "-")
    return " ".join(text.split())


def plain_text(text: str) -> str:
    r"""An answer for comparison as text: lower case, without spaces, ``\text{}``, dollars and full stop at the end."""
    return re.sub(r"\s|\$", "", _TEXT.sub(r"\1", text)).rstrip(".").lower()
