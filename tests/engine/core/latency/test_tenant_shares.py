"""Virtual token counters: who is charged, lifted and forgotten, and how far services can differ."""

import random

import pytest

from engine.core.latency.tenant_shares import (
    MAX_AHEAD_TOKENS,
    OUTPUT_TOKEN_CHARGE,
    OVER_SHARE_TOKENS,
    LeastServed,
    TenantShares,
)


def test_charges_are_divided_by_weight() -> None:
    shares = TenantShares({"big": 4.0})
    for tenant in ("big", "small"):
        shares.enter(tenant)
    for tenant in ("big", "small"):
        shares.charge(tenant, 100.0)
    assert (shares.tokens("big"), shares.tokens("small")) == (25.0, 100.0)


def wait(shares: TenantShares, tenant: str) -> None:
    """A request of the tenant arrives and waits."""
    shares.enter(tenant)
    shares.queue(tenant)


def test_a_tenant_that_returns_is_lifted_to_the_least_served_that_waits_and_never_lowered() -> None:
    shares = TenantShares()
    wait(shares, "a")
    wait(shares, "b")
    shares.enter("runs")
    shares.charge("a", 500.0)
    shares.charge("b", 300.0)
    shares.enter("new")
    assert shares.tokens("new") == 300.0
    shares.unqueue("a")
    shares.leave("a")
    shares.enter("a")
    assert shares.tokens("a") == 500.0


def test_an_engine_that_was_idle_lifts_to_the_tenant_that_waited_last() -> None:
    shares = TenantShares()
    wait(shares, "a")
    shares.unqueue("a")
    shares.charge("a", 700.0)
    shares.leave("a")
    shares.enter("b")
    assert shares.tokens("b") == 700.0


def test_an_answer_that_runs_for_long_saves_up_a_bounded_service() -> None:
    shares = TenantShares()
    shares.enter("light")
    wait(shares, "flood")
    shares.charge("flood", 1e6)
    wait(shares, "light")
    assert shares.tokens("light") == 1e6 - MAX_AHEAD_TOKENS
    assert shares.is_over_share("flood")
    shares.charge("light", 5000.0)
    shares.enter("light")  # while another one waits
    assert shares.tokens("light") == 1e6 - MAX_AHEAD_TOKENS + 5000.0


def test_over_share_is_relative_to_the_least_served_tenant_that_waits() -> None:
    shares = TenantShares()
    wait(shares, "flood")
    wait(shares, "light")
    shares.enter("runs")
    shares.charge("flood", OVER_SHARE_TOKENS)
    assert not shares.is_over_share("flood")
    shares.charge("flood", 1.0)
    assert shares.is_over_share("flood")
    assert not shares.is_over_share("light")
    shares.unqueue("light")
    assert not shares.is_over_share("flood")


def test_idle_tenants_are_forgotten_the_least_recently_active_first() -> None:
    shares = TenantShares(max_tenants=3)
    shares.enter("stays")
    for name in ("a", "b", "c", "d"):
        shares.enter(name)
        shares.charge(name, 10.0)
        shares.leave(name)
    assert [shares.tokens(name) for name in ("a", "b", "c", "d")] == [0.0, 0.0, 10.0, 10.0]
    shares.charge("stays", 1.0)
    assert shares.tokens("stays") == 1.0


def test_many_tenants_keep_few_counters() -> None:
    shares = TenantShares(max_tenants=100)
    for number in range(10_000):
        shares.enter(str(number))
        shares.charge(str(number), 1.0)
        shares.leave(str(number))
    assert sum(shares.tokens(str(number)) > 0.0 for number in range(10_000)) == 100


def test_tenants_that_left_take_no_memory_beside_one_that_gets_nothing() -> None:
    shares = TenantShares(max_tenants=100)
    wait(shares, "gets nothing")
    for number in range(10_000):
        wait(shares, str(number))
        shares.charge(str(number), 1.0)
        assert not shares.is_over_share(str(number))
        shares.unqueue(str(number))
        shares.leave(str(number))
    assert len(shares._waiting._heap) < 100


@pytest.mark.parametrize("seed", range(20))
def test_the_least_served_member_is_found_while_counters_grow_and_members_change(seed: int) -> None:
    rng = random.Random(seed)
    tokens = dict.fromkeys("abcdefgh", 0.0)
    least, members = LeastServed(tokens.__getitem__), set[str]()
    for _ in range(500):
        tenant = rng.choice("abcdefgh")
        match rng.randrange(3):
            case 0:
                members.add(tenant)
                least.add(tenant)
            case 1 if tenant in members:
                members.remove(tenant)
                least.remove(tenant)
                tokens[tenant] -= rng.choice((0.0, rng.random()))  # forgotten
            case 2:
                tokens[tenant] += rng.random()
        first = least.first()
        assert (first is None) == (not members)
        if first is not None:
            assert first in members
            assert tokens[first] == min(tokens[member] for member in members)


def test_a_tenant_that_is_added_again_takes_no_memory() -> None:
    least = LeastServed(lambda _: 0.0)
    for _ in range(1000):
        least.add("a")
        least.add("b")
    assert len(least._heap) == 2


class Shop:
    """A backlogged engine: `num_slots` requests run, in each step prompts get chunks and finished prompts a token; the
    next request is taken from the least served of the tenants that wait.
    """

    def __init__(self, seed: int, kv_charge: float) -> None:
        rng = self.rng = random.Random(seed)
        self.weights = {"a": 1.0, "b": rng.choice((1.0, 3.0)), "c": 0.5}
        self.shares, self.num_slots, self.kv_charge = TenantShares(self.weights), rng.randrange(1, 5), kv_charge
        self.chunk = rng.choice((50, 200, 1000))
        self.longest_prompt, self.longest_output = rng.choice((20, 400)), rng.choice((1, 20, 50))
        self.running: list[list[object]] = []  # tenant, prompt tokens left, output tokens left, tokens held
        self.service = dict.fromkeys(self.weights, 0.0)
        for tenant in self.weights:
            self.shares.enter(tenant)

    @property
    def bound(self) -> float:
        """U of the module for the lowest weight: what requests that run can still be charged."""
        longest = self.longest_prompt + self.longest_output
        num_steps = self.longest_output + -(-self.longest_prompt // self.chunk) * self.num_slots
        of_request = (
            self.longest_prompt + OUTPUT_TOKEN_CHARGE * self.longest_output + self.kv_charge * longest * num_steps
        )
        return self.num_slots * of_request / min(self.weights.values())

    def charge(self, tenant: str, num_tokens: float) -> None:
        self.shares.charge(tenant, num_tokens)
        self.service[tenant] += num_tokens / self.weights[tenant]

    def step(self) -> None:
        least = LeastServed(self.shares.tokens)
        for tenant in self.weights:
            least.add(tenant)
        while len(self.running) < self.num_slots:
            tenant = least.first()
            heavy = tenant == "a"  # tenants differ in what they send
            prompt = self.longest_prompt if heavy else self.rng.randrange(1, self.longest_prompt + 1)
            self.running.append([tenant, prompt, self.rng.randrange(1, self.longest_output + 1), 0])
        num_left = self.chunk
        for request in self.running:
            tenant, prompt, output, held = request
            self.charge(tenant, self.kv_charge * held)
            if prompt and num_left:
                chunk = min(prompt, num_left)
                num_left -= chunk
                request[1], request[3] = prompt - chunk, held + chunk
                self.charge(tenant, chunk)
            elif not prompt:
                request[2], request[3] = output - 1, held + 1
                self.charge(tenant, OUTPUT_TOKEN_CHARGE)
        self.running = [request for request in self.running if request[1] or request[2]]


@pytest.mark.parametrize("kv_charge", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(25))
def test_services_of_tenants_that_always_wait_differ_by_at_most_the_bound(seed: int, kv_charge: float) -> None:
    shop = Shop(seed, kv_charge)
    marks = []
    for _ in range(2000):
        shop.step()
        counters = [shop.shares.tokens(tenant) for tenant in shop.weights]
        assert max(counters) - min(counters) <= shop.bound
        marks.append(dict(shop.service))
    for _ in range(200):
        start, end = sorted(shop.rng.sample(range(len(marks)), 2))
        served = [marks[end][tenant] - marks[start][tenant] for tenant in shop.weights]
        assert max(served) - min(served) <= 2 * shop.bound
    if not kv_charge:  # which makes the bound large
        assert min(shop.service.values()) > 2 * shop.bound  # there was service to share
