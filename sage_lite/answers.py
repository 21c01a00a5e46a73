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
_NUMBER = r"(?<![\w.,])[-−+]?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s?\\?%)?"
_CANDIDATE = re.compile(f"{_MATHS}|{_NUMBER}", re.DOTALL)
_COMPUTED = re.compile(rf"=\s*({_NUMBER})(?!.*=)")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_PLAIN = re.compile(
    r"[$€£]? ?(?P<sign>[-+]?) ?[$€£]? ?(?P<whole>\d{1,3}(?:,\d{3})+|\d+)?(?P<point>\.\d+)?"
    r"(?: ?/ ?(?P<below>\d+))?(?P<unit>(?: [A-Za-z]{2,})*)"
)
_NO_UNITS = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "pi", "or", "and", "sqrt", "half", "to"}


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
    """The first or the last formula or number in a line of text; the result, if the line computes one with ``=``."""
    candidates = _CANDIDATE.findall(line)
    prose = _WORD.search(_COMMAND.sub(" ", line))
    if "\\" not in line and not re.search(_MATHS, line) and "=" in line:
        computed = _COMPUTED.search(line)
        if computed or not prose:
            return computed[1] if computed else line.rpartition("=")[2]
    if not candidates or not prose:
        return line
    return candidates[-1] if last else candidates[0]


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
    text = _TEXT.sub(r" \1", text).replace(r"\$", "$").replace(r"\!", "").replace("{,}", ",").replace("−", "-")
    match = _PLAIN.fullmatch(" ".join(text.split()))
    if not match or not (match["whole"] or match["point"]) or _NO_UNITS & set(match["unit"].lower().split()):
        return None
    if match["below"] and not match["below"].strip("0"):
        return None
    value = Fraction((match["whole"] or "0").replace(",", "") + (match["point"] or "")) / int(match["below"] or 1)
    return -value if match["sign"] == "-" else value


def plain_text(text: str) -> str:
    r"""An answer for comparison as text: lower case, without spaces, ``\text{}``, dollars and full stop at the end."""
    return re.sub(r"\s|\$", "", _TEXT.sub(r"\1", text)).rstrip(".").lower()
