"""Sends notices to a webhook, in a thread of its own, so that it never delays a round.

Nothing is queued. After each round, what should be reported is compared with what was reported.
Thus a notice is repeated until the receiver accepts it, and a notice that is out of date is never
sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from podgpu.clock import Clock, FaultLog, double_delay, spread_delay
from podgpu.errors import Note, PodgpuError, SourceError, UsageError
from podgpu.files import read_bounded
from podgpu.fleet.state import ClusterState
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session, parse_retry_after
from podgpu.watch import Watch
from podgpu.writers.webhook_notices import (
    Item,
    Notice,
    NoticeBook,
    NoticeEvent,
    ReportedNotice,
    find_situation,
    list_oldest,
)

_SECONDS = 60.0  # between two comparisons, if no round wakes the thread
_FIRST_DELAY = 2.0
_MAX_DELAY = 300.0
_LOG_SECONDS = 3600.0
_MAX_ITEMS = 50  # of one request; more are sent in further requests
_MAX_REQUESTS = 20  # after one round
_MAX_URL_BYTES = 8192
_MAX_ANSWER_BYTES = 64 * 1024
_TITLES = {
    NoticeEvent.BROKEN: ("GPU is broken", "GPUs are broken"),
    NoticeEvent.RECOVERED: ("GPU works again", "GPUs work again"),
    NoticeEvent.IDLE: ("pod does not use its GPUs", "pods do not use their GPUs"),
    NoticeEvent.OVER_BUDGET: ("budget is exceeded", "budgets are exceeded"),
}
# Slack's markup.
_SLACK = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_log = logging.getLogger(__name__)


class NoticeStore(Protocol):
    """Stores what was reported. The methods raise PodgpuError."""

    @property
    def is_in_memory(self) -> bool: ...

    def read_notices(self) -> dict[str, bytes]: ...

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None: ...


class MemoryStore:
    """For a cluster view that stores nothing, because Prometheus does."""

    is_in_memory = True

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def read_notices(self) -> dict[str, bytes]:
        return dict(self._entries)

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None:
        for key, content in changes.items():
            if content is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = content


@dataclass(frozen=True)
class WebhookSettings:
    url_file: str
    token_file: str = ""
    events: frozenset[NoticeEvent] = frozenset(NoticeEvent)
    idle_after: float = 4 * 3600.0
    timeout: float = 10.0

    def open_client(self) -> HttpClient:
        """Reads the URL. Raises SourceError, without the URL, which may be a secret."""
        url = read_bounded(self.url_file, _MAX_URL_BYTES).decode("utf-8", "replace").strip()
        message = f"{self.url_file} does not contain the URL of a webhook (https://…)"
        bad_url = SourceError("bad_url", message)
        if not url.startswith(("https://", "http://")):
            raise bad_url

        access = Access(
            token_file=self.token_file, advice="check the URL and the token in the files"
        )
        try:
            client = HttpClient(url, access, timeout=self.timeout, max_bytes=_MAX_ANSWER_BYTES)
        except UsageError:
            raise bad_url from None

        # The path of many webhooks is a secret.
        client.shown = f"the webhook at {client.host}"
        return client


class WebhookMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of a request. Slack and Mattermost read only `text`."""

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    id: str  # is the same if a request is repeated
    event: NoticeEvent
    at: float  # Unix time
    text: str
    items: list[Item]


def make_message(event: NoticeEvent, items: Sequence[Item], now: float) -> WebhookMessage:
    title, titles = _TITLES[event]
    if len(items) != 1:
        title = titles

    lines = [f"podgpu: {len(items)} {title}"]
    identity: list[str] = [event]
    for item in items:
        lines.append(f"• {item.text}")
        identity.append(f"{item.key} {item.since}")

    text = "\n".join(lines)
    for character, escaped in _SLACK.items():
        text = text.replace(character, escaped)

    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()

    return WebhookMessage(
        id=digest[:32],
        event=event,
        at=round(now, 3),
        text=text,
        items=list(items),
    )


class Webhook(Watch):
    name = "webhook"

    def __init__(
        self,
        settings: WebhookSettings,
        read_state: Callable[[], ClusterState],
        store: NoticeStore,
        clock: Clock | None = None,
        delay: Callable[[float], float] = spread_delay,
    ) -> None:
        """Raises UsageError if the file with the URL cannot be used."""
        super().__init__()
        try:
            settings.open_client()
        except SourceError as error:
            raise UsageError(f"--webhook-url-file: {error}") from error

        self._settings = settings
        self._read_state = read_state
        self._store = store
        self._clock = clock or Clock()
        self._delay = delay
        self._book = NoticeBook(self._clock.wall(), repeats_old=not store.is_in_memory)
        self._reported: dict[str, ReportedNotice] = {}
        self._unsaved: dict[str, bytes | None] = {}  # by key; None: delete the entry
        self._due = float("-inf")  # monotonic time of the next attempt
        self._failures = 0
        self._problems: dict[str, str] = {}  # of the webhook and of the history
        self._faults: FaultLog[str] = FaultLog(self._clock.monotonic, _LOG_SECONDS)
        self.sent = 0  # accepted requests

    def warnings(self) -> Sequence[Note]:
        """Warnings to show on the page."""
        notes = []
        for part, problem in self._problems.items():
            text = f"webhook: {problem}; podgpu retries"
            notes.append(Note(f"webhook {part}", text, is_logged=True))
        return notes

    def update(self) -> None:
        """Sends the notices that are due. Sets the pause until the next call."""
        self.pause = _SECONDS
        state = self._read_state()
        # A view of too many GPUs to read all has no list of broken GPUs.
        if state.taken_at is None or state.totals_only is not None:
            return

        self._load()
        wanted = self._find_wanted(state)
        if wanted and self._clock.monotonic() >= self._due:
            asyncio.run(self._send_all(wanted))
        self._save()

        if wanted:
            # A request that failed is repeated when it is due. If there were too many notices for
            # this time, the next call sends the others after a second.
            wait = self._due - self._clock.monotonic()
            self.pause = min(_SECONDS, max(1.0, wait))

    def _find_wanted(self, state: ClusterState) -> list[Notice]:
        """Returns the notices to send. Forgets what is over, and what is too much to remember."""
        now = self._clock.wall()
        situation = find_situation(state, self._settings.idle_after, now)
        notices, over = self._book.compare(situation, self._reported, now, self._clock.monotonic())
        for key in over:
            self._forget(key)
        for key in list_oldest(self._reported.items()):
            self._forget(key)

        wanted = [notice for notice in notices if notice.event in self._settings.events]
        # The others count as reported, because a recovery is only found after its problem.
        unwanted = [notice for notice in notices if notice.event not in self._settings.events]
        self._mark(unwanted, now)
        return wanted

    # What was reported

    def _load(self) -> None:
        try:
            stored = self._store.read_notices()
            self._reported = {key: _decode_reported(content) for key, content in stored.items()}
        except (PodgpuError, msgspec.MsgspecError) as error:
            # What this process has reported is still known.
            self._report("history", f"what was reported cannot be read: {error}")
            return

        if not self._unsaved:
            self._recover("history")

        for key, content in self._unsaved.items():
            if content is None:
                self._reported.pop(key, None)
            else:
                self._reported[key] = _decode_reported(content)

    def _mark(self, notices: Sequence[Notice], now: float) -> None:
        """Remembers that these notices were sent. The end of a problem ends its entry."""
        for notice in notices:
            key = notice.item.key
            if notice.event == NoticeEvent.RECOVERED:
                self._forget(key)
                continue
            reported = ReportedNotice(notice.event, notice.item, now)
            self._reported[key] = reported
            self._unsaved[key] = msgspec.json.encode(reported)

    def _forget(self, key: str) -> None:
        self._reported.pop(key, None)
        self._unsaved[key] = None

    def _save(self) -> None:
        if not self._unsaved:
            return

        try:
            self._store.write_notices(self._unsaved)
        except PodgpuError as error:
            text = f"what was reported cannot be stored, so a restart repeats it: {error}"
            self._report("history", text)
            return

        self._unsaved = {}
        self._recover("history")

    # Requests

    async def _send_all(self, notices: Sequence[Notice]) -> None:
        async with open_session() as session:
            for number, batch in enumerate(_make_batches(notices)):
                if number == _MAX_REQUESTS:
                    return

                now = self._clock.wall()
                items = [notice.item for notice in batch]
                message = make_message(batch[0].event, items, now)
                try:
                    client = self._settings.open_client()
                    response = await client.send(
                        session,
                        "POST",
                        content=msgspec.json.encode(message),
                        headers={"Content-Type": "application/json"},
                    )
                    if not 200 <= response.status < 300:
                        raise _explain_status(client, response, now)
                except SourceError as error:
                    self._fail(error)
                    return

                self.sent += 1
                self._failures = 0
                self._recover("webhook")
                self._mark(batch, now)
                # If podgpu is killed now, at most this request is repeated.
                self._save()

    def _fail(self, error: SourceError) -> None:
        longest = double_delay(self._failures, _FIRST_DELAY, _MAX_DELAY)
        self._failures += 1
        wait = max(self._delay(longest), error.retry_after)
        self._due = self._clock.monotonic() + wait
        self._report("webhook", str(error), error.reason)

    # Each change of `_problems` makes a new dict, because `warnings` runs in other threads.

    def _report(self, part: str, problem: str, reason: str = "failed") -> None:
        self._problems = {**self._problems, part: problem}
        if self._faults.fail(part, reason):
            _log.warning("webhook: %s; podgpu retries", problem)

    def _recover(self, part: str) -> None:
        self._problems = {name: text for name, text in self._problems.items() if name != part}
        if self._faults.recover(part):
            _log.info("webhook: works again")


def _explain_status(client: HttpClient, response: HttpResponse, now: float) -> SourceError:
    """Does not quote the body, because it may contain the URL."""
    status = response.status
    advice = ""
    if status in (401, 403):
        advice = ": it rejects the URL or the token, check both files"
    elif status < 500 and status != 429:
        advice = ": check the URL in the file. Redirects are not followed"

    text = f"{client.shown} answers {status}{advice}"
    retry_after = parse_retry_after(response.retry_after, now)
    return SourceError(f"http_{status}", text, retry_after)


def _decode_reported(content: bytes) -> ReportedNotice:
    return msgspec.json.decode(content, type=ReportedNotice)


def _make_batches(notices: Collection[Notice]) -> Iterator[list[Notice]]:
    """Yields what is sent in one request: the notices of one event, at most `_MAX_ITEMS`."""
    for event in NoticeEvent:
        own = [notice for notice in notices if notice.event == event]
        for start in range(0, len(own), _MAX_ITEMS):
            yield own[start : start + _MAX_ITEMS]


def parse_events(text: str) -> frozenset[NoticeEvent]:
    """Parses the value of --webhook-events. Raises UsageError."""
    names = {name.strip() for name in text.split(",")} - {""}
    if not names or not names.issubset(NoticeEvent):
        raise UsageError(f"--webhook-events {text}: give a list of {', '.join(NoticeEvent)}")
    return frozenset(map(NoticeEvent, names))
