"""A fleet whose boards and pusher run only the pure parts of a change, step by step, in any order and with kills."""

from dataclasses import dataclass, field

from ls_edge.runtime.change.planner import Goal, plan_change, version_of
from ls_edge.runtime.change.progress import Seen, next_instruction
from ls_edge.runtime.change.record import TRIAL_STARTS, AppliedFile, StoreRecord
from ls_edge.runtime.routing.state.events import Complete
from tests.faults.simulation import FaultySimulation

NOTHING = frozenset()


@dataclass
class Board:
    """A peer with a store: what is on its disk, and what its process does."""

    name: str
    record: StoreRecord
    opened: tuple[str, str] = ("", "")
    """Bundle and file that its process serves."""
    warm: bool = True
    is_up: bool = True
    offered: tuple[str, AppliedFile] | None = None
    state: str = "idle"
    known: set = field(default_factory=set)
    """Files that it has received."""

    is_listed: bool = True
    """Whether the offered file lists it."""

    def receive_offer(self, bundle, file, *, is_listed):
        if self.is_up and self.offered != (bundle, file):
            self.offered, self.state, self.is_listed = (bundle, file), "receiving", is_listed

    def install(self, world):
        if self.state != "ready" or not self.is_up:
            return
        bundle, file = self.offered
        pauses = (
            not self.is_listed
            or bundle != self.opened[0]
            or world.files[file.digest].get(self.name) != world.files[self.opened[1]].get(self.name)
        )
        self.record, self.state = self.record.switched(bundle, file, is_listed=self.is_listed), "switching"
        if pauses:
            self.warm = False
        else:
            self.opened = (bundle, file.digest)

    def end(self):
        if self.is_up and self.state == "active":
            self.record = self.record.ended()

    def proceed(self):
        """Do the next thing that its process does alone; return whether there was any."""
        before = (self.record, self.state, self.warm)
        if not self.is_up:
            return False
        if not self.warm:
            self.warm, self.opened = True, (self.record.active or "", self.record.file.digest)
        elif self.record.trial_starts is not None:
            self.record = self.record.confirmed()
        elif self.offered is not None and self.state in ("receiving", "switching"):
            bundle, file = self.offered
            is_removed = not self.is_listed and self.record.active is None and file in self.record.accepts
            if (self.record.active, self.record.file) == (bundle, file) or is_removed:
                self.state = "active"
            elif self.state == "receiving":
                self.record, self.state = self.record.accepting(file, self.record.file), "ready"
                self.known |= {file.digest, self.record.file.digest}
        return before != (self.record, self.state, self.warm)

    def kill(self):
        self.is_up, self.warm, self.offered, self.state = False, False, None, "idle"

    def start(self):
        self.is_up = True
        if self.record.trial_starts is not None:
            assert self.record.trial_starts <= TRIAL_STARTS

    def parts(self, world):
        """Parts that others can use."""
        bundle, file = self.opened
        return world.files[file].get(self.name, NOTHING) if bundle and self.warm else NOTHING

    def model(self, world):
        return world.models.get(self.opened[0], "")


@dataclass
class Pusher:
    """The process of ``ls-edge apply``, from its look at the fleet on."""

    world: "World"
    bundle: str
    digest: str
    missing: set = field(default_factory=set)
    states: dict = field(default_factory=dict)

    def __post_init__(self):
        world = self.world
        there = {name: board for name, board in world.boards.items() if board.is_up and board.warm}
        self.missing = set(world.boards) - set(there)
        announced = [[(f.version, f.digest) for f in (b.record.file, *b.record.accepts)] for b in there.values()]
        self.file = AppliedFile(version_of(self.digest, announced), self.digest)
        new, model = world.files[self.digest], world.models[self.bundle]
        goals = {
            name: Goal(
                new[name],
                pauses=self.bundle != board.opened[0] or new[name] != world.files[board.opened[1]].get(name),
                is_reached=board.record.file == self.file and board.record.active == self.bundle,
            )
            for name, board in there.items()
            if name in new
        }
        others = [name for name, board in there.items() if board.model(world) not in ("", model)]
        self.plan = plan_change({name: board.parts(world) for name, board in there.items()}, goals, others)
        self.there, self.model = there, model

    def step(self):
        """Do one thing; return whether the change is over or cannot begin."""
        if self.plan.outages or not self.there:
            return True
        for board in self.there.values():
            board.receive_offer(self.bundle, self.file, is_listed=board.name in self.world.files[self.digest])
        fleet = {name: self._seen(board) for name, board in self.there.items()}
        now = next_instruction(self.plan, fleet, self.there, self.model, is_whole=not self.missing)
        if now.phase == "switch":
            self.there[now.peer].install(self.world)
        elif now.phase == "end":
            self.there[now.peer].end()
        return now.phase == "done"

    def _seen(self, board):
        files = (board.record.file, *board.record.accepts) if board.is_up else ()
        if board.is_up:  # otherwise the last report counts
            self.states[board.name] = board.state
        return Seen(
            board.parts(self.world),
            board.model(self.world) if board.is_up else "",
            has_files=self.states.get(board.name) in ("ready", "switching", "active"),
            is_active=self.states.get(board.name) == "active",
            accepts=any(file.digest == self.digest for file in files),
            has_ended=files == (self.file,) or board.name not in self.world.files[self.digest],
        )


class World:
    """Boards of a fleet and one pusher, who may be killed and follow one another."""

    def __init__(self, placement, bundles):
        """Begin with ``placement``; ``bundles`` has the model of each bundle, the first one is served."""
        self.files, self.models = {"0": placement}, bundles
        first = next(iter(bundles))
        record = StoreRecord(active=first, file=AppliedFile(1, "0"))
        self.boards = {name: Board(name, record, (first, "0")) for name in placement}
        self.pusher, self.wanted = None, (first, "0")
        self.goals = [self.wanted]

    def apply(self, bundle, placement):
        """Begin to change the fleet; the pusher before is gone."""
        digest = next((d for d, known in self.files.items() if known == placement), str(len(self.files)))
        self.files[digest] = placement
        for name in placement:
            if name not in self.boards:  # a new board was started with the new file
                self.boards[name] = Board(name, StoreRecord(file=AppliedFile(0, digest)), ("", digest))
        self.wanted = (bundle, digest)
        self.goals.append(self.wanted)
        self.again()

    def again(self):
        """Run the same command again."""
        self.pusher = None
        self.drop_offers()
        self.pusher = Pusher(self, *self.wanted)

    def drop_offers(self):
        """End the links of the pusher; a switch that has begun goes on."""
        for board in self.boards.values():
            board.offered, board.state = None, "idle"

    def kill_pusher(self):
        self.pusher = None
        self.drop_offers()

    def step(self, actor):
        """Let the pusher or a board do one thing, which must not take a part away; return whether anything changed."""
        before = self.gap()
        if actor in self.boards:
            changed = self.boards[actor].proceed()
        else:
            if self.pusher is not None and self.pusher.step():
                self.pusher = None
            changed = self.pusher is not None
        assert len(self.gap()) <= len(before), self.boards
        self.check()
        return changed

    def check(self):
        """Raise AssertionError if a board is between two states, or boards refuse one another."""
        known = {None, *(pair for pair in self.goals)}
        for board in self.boards.values():
            record = board.record
            assert record.active is None or (record.active, record.file.digest) in known, record
            for other in self.boards.values():  # a board that was away does not know all files
                if other.record.active and record.active and other.record.file.digest in board.known:
                    accepted = {file.digest for file in (record.file, *record.accepts)}
                    assert other.record.file.digest in accepted, (board, other)

    def gap(self):
        """Parts that nobody serves now, of the model of which the fewest are missing."""
        whole = frozenset().union(*self.files["0"].values())
        serving = [board for board in self.boards.values() if board.warm]
        return min(
            (
                whole.difference(*(board.parts(self) for board in serving if board.model(self) == model))
                for model in self.models.values()
            ),
            key=len,
        )

    def complete(self):
        """Let everybody work until the last change has ended."""
        for board in self.boards.values():
            board.start()
        for _ in range(40 * len(self.boards)):
            for name in self.boards:
                while self.step(name):
                    pass
            if self.pusher is None:
                _, digest = self.wanted
                listed = [board for name, board in self.boards.items() if name in self.files[digest]]
                if all(b.opened == self.wanted and not b.record.accepts and b.warm for b in listed):
                    return
                self.again()
                assert not self.pusher.plan.outages, (self.pusher.plan, self.boards)
            self.step("pusher")
        raise AssertionError(f"not completed: {self.boards}")


class AnsweringWorld(World):
    """A fleet of one model whose boards answer requests in simulated time, by their routing machines."""

    def __init__(self, placement, seed=0):
        super().__init__(placement, {"old": "m0"})
        self.held = {name: tuple(sorted(parts)) for name, parts in placement.items()}
        self.sim = FaultySimulation(self.held, blocks=len(frozenset().union(*placement.values())), seed=seed)
        self.sim.run(0.3)

    def step(self, actor):
        """Do one thing, with a request under way; a board opens again when it has handed on its requests."""
        self.sim.submit(budget=20.0)
        self.sim.run(0.015)
        board = self.boards.get(actor)
        if board is not None and board.is_up and not board.warm:
            process = self.sim.processes[actor]
            if process.alive and not self.sim.is_idle(actor):
                return True
            if process.alive:
                self.sim.kill(actor)
        warm = {name: one.warm for name, one in self.boards.items()}
        changed = super().step(actor)
        for name, one in self.boards.items():
            if warm[name] and not one.warm:
                self.sim.drain(name)
            elif one.warm and not warm[name]:
                self.held[name] = tuple(sorted(one.parts(self)))
                self.sim.restart(name)
                self.sim.run(0.1)
        return changed

    def kill(self, name):
        """Kill a board."""
        self.boards[name].kill()
        self.sim.kill(name)

    def check_answers(self):
        """Raise AssertionError unless each request has an answer with all blocks."""
        self.sim.settle()
        assert len(self.sim.outcomes) > 20
        for outcomes in self.sim.outcomes.values():
            (outcome,) = outcomes
            assert isinstance(outcome, Complete), outcome
            assert len(outcome.tokens) == self.sim.settings.blocks
