"""A ticket is valid once, at its time, for the request it was made for; anything else is refused with a reason."""

import base64

import pytest

from frontend.generation.retry_ticket import EARLY_S, LATE_S, Promise, RetryTickets, TicketError

PROMISE = Promise("acme", "interactive", 1000.0, 500)


@pytest.fixture
def tickets():
    return RetryTickets(b"k" * 16)


@pytest.fixture
def ticket(tickets):
    return tickets.issue(7, PROMISE)


def test_a_ticket_redeems_its_booking(tickets, ticket):
    assert tickets.redeem(ticket, PROMISE) == 7


def test_a_ticket_can_be_sent_in_a_header(ticket):
    assert ticket.isascii()
    assert set(ticket) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert len(ticket) <= 64


def test_a_ticket_is_valid_once(tickets, ticket):
    tickets.redeem(ticket, PROMISE)
    with pytest.raises(TicketError, match="has been used"):
        tickets.redeem(ticket, PROMISE)


@pytest.mark.parametrize("now_s", [1000 - EARLY_S, 1000.0, 1000 + LATE_S])
def test_a_ticket_is_valid_from_its_slot_on(tickets, ticket, now_s):
    tickets.redeem(ticket, PROMISE._replace(slot_s=now_s))


@pytest.mark.parametrize(
    ("now_s", "message"),
    [
        (1000 - EARLY_S - 0.01, r"is valid in 0.26 s, not yet"),
        (900.0, r"is valid in 100.00 s, not yet"),
        (1000 + LATE_S + 2, r"expired 2.00 s ago: send the request without it"),
    ],
)
def test_early_and_late_tickets_are_refused_with_the_time(tickets, ticket, now_s, message):
    with pytest.raises(TicketError, match=message):
        tickets.redeem(ticket, PROMISE._replace(slot_s=now_s))


def test_an_early_ticket_is_not_used_up(tickets, ticket):
    with pytest.raises(TicketError):
        tickets.redeem(ticket, PROMISE._replace(slot_s=900.0))
    tickets.redeem(ticket, PROMISE)


@pytest.mark.parametrize(
    "changed", [{"tenant": "other"}, {"service_class": "batch"}, {"tenant": "acmei", "service_class": "nteractive"}]
)
def test_a_ticket_is_bound_to_tenant_and_class(tickets, ticket, changed):
    with pytest.raises(TicketError, match="is no ticket of this server for this tenant and service class"):
        tickets.redeem(ticket, PROMISE._replace(**changed))


def test_a_ticket_is_for_a_prompt_that_is_not_longer(tickets, ticket):
    with pytest.raises(TicketError, match="is for about 500 prompt tokens, the prompt has about 501"):
        tickets.redeem(ticket, PROMISE._replace(num_tokens=501))
    tickets.redeem(ticket, PROMISE._replace(num_tokens=3))


def test_every_changed_bit_is_a_forgery(tickets, ticket):
    data = base64.urlsafe_b64decode(ticket)
    for bit in range(8 * len(data)):
        forged = bytearray(data)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TicketError, match="is no ticket of this server"):
            tickets.redeem(base64.urlsafe_b64encode(forged).decode(), PROMISE)


@pytest.mark.parametrize("text", ["", "x", "====", "a" * 300, "ä", "a b", "\0"])
def test_texts_that_are_no_tickets_are_refused(tickets, text):
    with pytest.raises(TicketError, match="is no ticket of this server"):
        tickets.redeem(text, PROMISE)


def test_the_key_decides_whose_tickets_are_valid(tickets, ticket):
    assert RetryTickets(b"k" * 16).redeem(ticket, PROMISE) == 7
    with pytest.raises(TicketError):
        RetryTickets(b"l" * 16).redeem(ticket, PROMISE)


def test_used_tickets_are_forgotten_when_they_have_expired(tickets):
    for number in range(1000):
        promise = PROMISE._replace(slot_s=1000.0 + number)
        tickets.redeem(tickets.issue(number, promise), promise)
    assert tickets.num_used <= LATE_S + 2
