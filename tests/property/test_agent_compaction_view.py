"""Whatever a history holds and wherever it is summarised, what a model is told fits together."""

from hypothesis import given
from hypothesis import strategies as st

from sbx.agent.compaction import Compaction, estimated, to_cover, view
from sbx.agent.history import Kept
from sbx.agent.messages import Message, ToolCall

texts = st.text(max_size=60)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """User messages, and steps of one answer and the results of its calls."""
    messages = [Message("user", draw(texts))]
    for step in range(draw(st.integers(0, 14))):
        if draw(st.booleans()):
            messages.append(Message("user", draw(texts)))
        calls = tuple(
            ToolCall(f"{step}-{number}", "t", draw(texts))
            for number in range(draw(st.integers(0, 3)))
        )
        messages.append(Message("assistant", draw(texts), tool_calls=calls))
        messages += [Message("tool", draw(texts), tool_call_id=call.id) for call in calls]
    return messages


@given(histories(), st.integers(1, 60), st.integers(1, 5), st.integers(1, 6))
def test_a_view_is_whole(
    messages: list[Message], above_tokens: int, keep_steps: int, every: int
) -> None:
    """The history grows as a run lets it, and is summarised between two steps where it should."""
    how = Compaction(above_tokens, keep_steps)
    kept: list[Kept] = []
    for number, message in enumerate(messages):
        complete = message.role != "tool" and not waiting(kept)
        if complete and number % every == 0 and (covers := to_cover(kept, how)) is not None:
            before = covered(kept)
            assert covers > before, "each summary covers more"
            kept.append(Kept(len(kept) + 1, Message("summary", "…"), 0.0, covers))
        kept.append(Kept(len(kept) + 1, message, 0.0))
        check(kept, how)


def check(kept: list[Kept], how: Compaction) -> None:
    answer, there = view(kept), [one.message for one in kept if one.message.role != "summary"]
    assert answer[0] is there[0], "the first user message"
    answers = [one for one in there if one.role == "assistant"]
    last = answers[-how.keep_steps :]
    if last and estimated(there[place(there, last[0]) :]) * 2 > how.above_tokens:
        last = last[-1:]
    assert all(any(one is other for other in answer) for one in last)
    last_user = [one for one in there if one.role == "user"][-1]
    assert any(one is last_user for one in answer)
    order = [place(there, one) for one in answer if one.role != "summary"]
    assert order == sorted(order)
    assert len(order) == len(set(order))
    open_calls: set[str] = set()
    for one in answer:
        if one.role == "tool":
            assert one.tool_call_id in open_calls
            open_calls.discard(one.tool_call_id)
        else:
            assert not open_calls, "a call without its result"
            open_calls = {call.id for call in one.tool_calls}
    assert [one.role for one in answer].count("summary") == (covered(kept) > 0)


def place(there: list[Message], message: Message) -> int:
    return next(number for number, one in enumerate(there) if one is message)


def covered(kept: list[Kept]) -> int:
    return max((one.covers or 0 for one in kept), default=0)


def waiting(kept: list[Kept]) -> bool:
    answered = {one.message.tool_call_id for one in kept}
    return any(call.id not in answered for one in kept for call in one.message.tool_calls)
