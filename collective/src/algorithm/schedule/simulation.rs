//! Simulation of the schedule and the payload under adversarial interleavings, with queues instead
//! of sockets.
//!
//! A send copies its bytes in two halves, with other events in between, as a socket does that
//! accepts half a frame. A killed rank closes its links; data that it had sent still arrives (its
//! process died) or is lost (its host died). A rank that detects a closed link that it still needs
//! fails, and closes its own links.
//!
//! Assertions:
//! * at the end every rank is done, failed or killed: no rank hangs;
//! * a rank that is done has the reference result, bit for bit, and every rank's note. Since every
//!   contribution is in the reference, **no rank reports success without the contribution of every
//!   rank**;
//! * no rank fails without a kill; and after a kill, the next rank is not done unless the victim
//!   had sent it everything.

use std::collections::{HashSet, VecDeque};

use super::{Piece, RankInfo, Schedule, Span};
use crate::algorithm::chunk;
use crate::algorithm::payload::{Body, Payload};
use crate::testing::conformance::Random;

#[test]
fn every_interleaving_of_a_small_all_reduce_ends_in_the_same_bits() {
    let mut states = 0;
    for (world, len) in [(1, 2), (2, 0), (2, 1), (2, 2), (2, 4), (3, 0), (3, 2), (3, 3)] {
        let case =
            Case { world, span: Span { len, segment_len: 1 }, operation: Operation::AllReduce };
        states += explore(case, None);
    }
    assert!(states > 1000, "only {states} states: the exploration is cut short");
}

#[test]
fn a_kill_at_any_point_of_any_interleaving_never_fakes_a_success() {
    for (world, len) in [(2, 1), (2, 2), (3, 0), (3, 2)] {
        for victim in 0..world {
            for queue_is_lost in [false, true] {
                let case = Case {
                    world,
                    span: Span { len, segment_len: 1 },
                    operation: Operation::AllReduce,
                };
                explore(case, Some(Kill { victim, queue_is_lost }));
            }
        }
    }
}

#[test]
fn all_worlds_lengths_and_segments_reach_the_reference() {
    for world in 1..=9 {
        for len in 0..=40 {
            for segment_len in [1, 3, 100] {
                let span = Span { len, segment_len };
                for policy in Policy::two((world * 1000 + len + segment_len) as u64) {
                    play(Case { world, span, operation: Operation::AllReduce }, policy, None);
                }
            }
        }
    }
}

#[test]
fn all_gathers_and_broadcasts_reach_every_rank() {
    for world in 1..=9 {
        for policy in Policy::several(world as u64) {
            let nothing = Span { len: 0, segment_len: 1 };
            play(Case { world, span: nothing, operation: Operation::AllGather }, policy, None);
            for root in 0..world {
                for len in [0, 1, 2, 5, 13] {
                    for segment_len in [1, 2, 100] {
                        let span = Span { len, segment_len };
                        let operation = Operation::Broadcast { root };
                        play(Case { world, span, operation }, policy, None);
                    }
                }
            }
        }
    }
}

#[test]
fn a_kill_after_any_number_of_events_never_fakes_a_success() {
    for (world, len, segment_len) in [(2, 7, 2), (3, 7, 2), (4, 9, 1), (5, 3, 1), (6, 13, 2)] {
        let span = Span { len, segment_len };
        for operation in
            [Operation::AllGather, Operation::AllReduce, Operation::Broadcast { root: world - 1 }]
        {
            for at_event in 0.. {
                let mut killed = false;
                for victim in 0..world {
                    for policy in Policy::two(at_event + victim as u64) {
                        let kill = Kill { victim, queue_is_lost: at_event % 2 == 0 };
                        killed |=
                            play(Case { world, span, operation }, policy, Some((at_event, kill)));
                    }
                }
                if !killed {
                    break;
                }
            }
        }
    }
}

/// Explores every state that any order of events can reach; returns their number.
fn explore(case: Case, kill: Option<Kill>) -> usize {
    let mut seen = HashSet::new();
    let mut open = vec![(Ring::new(case, 2), kill)];
    while let Some((ring, kill)) = open.pop() {
        if !seen.insert((ring.fingerprint(), kill.is_some())) {
            continue;
        }
        let events = ring.events();
        if events.is_empty() {
            ring.assert_ended();
        }
        for event in events {
            let mut after = ring.clone();
            after.step(event);
            open.push((after, kill));
        }
        if let Some(kill) = kill {
            let mut after = ring;
            after.kill(kill);
            open.push((after, None));
        }
    }
    seen.len()
}

/// Runs one order of events to its end; true if there was a kill.
fn play(case: Case, policy: Policy, kill: Option<(u64, Kill)>) -> bool {
    let mut ring = Ring::new(case, if policy.seed.is_multiple_of(2) { 1 } else { usize::MAX });
    let mut random = Random(policy.seed);
    let mut last = 0;
    for number in 0.. {
        if let Some((at_event, kill)) = kill
            && number == at_event
        {
            ring.kill(kill);
        }
        let events = ring.events();
        let Some(event) = policy.pick(&events, last, &mut random) else { break };
        last = event.rank;
        ring.step(event);
    }
    ring.assert_ended();
    ring.victim.is_some()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    world: usize,
    span: Span,
    operation: Operation,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    AllGather,
    AllReduce,
    Broadcast { root: usize },
}

#[derive(Clone, Copy, Debug)]
struct Kill {
    victim: usize,
    queue_is_lost: bool,
}

/// Which event happens next.
#[derive(Clone, Copy, Debug)]
struct Policy {
    bias: Bias,
    seed: u64,
}

#[derive(Clone, Copy, Debug)]
enum Bias {
    HighestRank,
    LowestRank,
    None,
    ReceivesFirst,
    /// One rank runs as long as it can.
    Sticky,
}

impl Policy {
    /// Returns one biased policy, chosen by the seed, and one fair policy.
    fn two(seed: u64) -> impl Iterator<Item = Self> {
        let biases = [Bias::HighestRank, Bias::LowestRank, Bias::ReceivesFirst, Bias::Sticky];
        [biases[seed as usize / 2 % 4], Bias::None].into_iter().map(move |bias| Self { bias, seed })
    }

    fn several(seed: u64) -> impl Iterator<Item = Self> {
        [Bias::HighestRank, Bias::LowestRank, Bias::None, Bias::ReceivesFirst, Bias::Sticky]
            .into_iter()
            .zip(seed..)
            .map(|(bias, seed)| Self { bias, seed })
    }

    fn pick(self, events: &[Event], last: usize, random: &mut Random) -> Option<Event> {
        let any = events.get(random.below(events.len().max(1)));
        let preferred = match self.bias {
            Bias::HighestRank => events.last(),
            Bias::LowestRank => events.first(),
            Bias::None => None,
            Bias::ReceivesFirst => events.iter().find(|event| event.kind == EventKind::Receive),
            Bias::Sticky => events.iter().find(|event| event.rank == last),
        };
        preferred.or(any).copied()
    }
}

#[derive(Clone, Copy, Debug)]
struct Event {
    rank: usize,
    kind: EventKind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum EventKind {
    BeginSend,
    /// Detects that a link that is still needed is closed.
    Fail,
    FinishSend,
    Receive,
}

#[derive(Clone)]
struct Ring {
    case: Case,
    ranks: Vec<Rank>,
    /// Link `r` runs from rank `r` to the next.
    links: Vec<Link>,
    capacity: usize,
    /// The killed rank, and whether all its sends had been completed and not lost.
    victim: Option<(usize, bool)>,
}

#[derive(Clone)]
struct Rank {
    schedule: Schedule,
    src: Vec<f32>,
    dst: Vec<f32>,
    notes: Vec<Vec<u8>>,
    /// The piece that is half sent, and its first half.
    sending: Option<(Piece, Vec<u8>)>,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum State {
    Done,
    Failed,
    Killed,
    Running,
}

#[derive(Clone, Default)]
struct Link {
    queue: VecDeque<Message>,
    sender_ended: bool,
    receiver_ended: bool,
}

#[derive(Clone)]
struct Message {
    piece: Piece,
    note: Vec<u8>,
    body: Vec<u8>,
}

impl Ring {
    fn new(case: Case, capacity: usize) -> Self {
        let world = case.world;
        let ranks = (0..world).map(|rank| Rank::new(case, rank)).collect();
        let mut ring =
            Self { case, ranks, links: vec![Link::default(); world], capacity, victim: None };
        (0..world).for_each(|rank| ring.finish_if_done(rank));
        ring
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, rank) in self.ranks.iter().enumerate() {
            if rank.state != State::Running {
                continue;
            }
            let (out, inward) = (&self.links[index], &self.links[self.prev(index)]);
            let mut add = |kind| events.push(Event { rank: index, kind });
            if rank.sending.is_some() {
                add(EventKind::FinishSend);
            } else if rank.schedule.next_send().is_some() && out.queue.len() < self.capacity {
                add(EventKind::BeginSend);
            }
            let expects = rank.schedule.next_receive().is_some();
            if expects && !inward.queue.is_empty() {
                add(EventKind::Receive);
            }
            let is_drained = expects && inward.queue.is_empty() && inward.sender_ended;
            if is_drained || (rank.schedule.has_sends_left() && out.receiver_ended) {
                add(EventKind::Fail);
            }
        }
        events
    }

    fn step(&mut self, event: Event) {
        let prev = self.prev(event.rank);
        let rank = &mut self.ranks[event.rank];
        match event.kind {
            EventKind::BeginSend => {
                let piece = rank.schedule.next_send().unwrap();
                let bytes =
                    rank.with_payload(self.case, |payload| payload.send_bufs(&piece).1.to_vec());
                rank.sending = Some((piece, bytes[..bytes.len() / 2].to_vec()));
            }
            EventKind::Fail => {
                rank.state = State::Failed;
                self.end_links(event.rank);
            }
            EventKind::FinishSend => {
                let (piece, mut body) = rank.sending.take().unwrap();
                let (note, now) = rank.with_payload(self.case, |payload| {
                    let (note, body) = payload.send_bufs(&piece);
                    (note.to_vec(), body.to_vec())
                });
                body.extend_from_slice(&now[body.len()..]);
                rank.schedule.on_sent();
                self.links[event.rank].queue.push_back(Message { piece, note, body });
            }
            EventKind::Receive => {
                let Message { piece: sent, note, body } =
                    self.links[prev].queue.pop_front().unwrap();
                let piece = rank.schedule.next_receive().unwrap();
                assert_eq!(
                    (sent.step, sent.segment, sent.origin, &sent.range, sent.note),
                    (piece.step, piece.segment, piece.origin, &piece.range, piece.note)
                );
                assert!(
                    !rank.schedule.next_receive_is_early(),
                    "{:?}: {piece:?} came early",
                    self.case
                );
                rank.with_payload(self.case, |payload| {
                    if piece.note {
                        payload.expect_note(&piece, note.len());
                    }
                    let (note_place, body_place) = payload.recv_bufs(&piece);
                    note_place.copy_from_slice(&note);
                    body_place.copy_from_slice(&body);
                    payload.on_received(&piece);
                });
                rank.schedule.on_received();
            }
        }
        self.finish_if_done(event.rank);
    }

    /// A rank with nothing left to do is done: it checks its result, and may close its links at
    /// once.
    fn finish_if_done(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        if rank.state == State::Running && rank.schedule.is_done() {
            rank.state = State::Done;
            rank.assert_result(self.case);
            self.end_links(index);
        }
    }

    fn kill(&mut self, kill: Kill) {
        let rank = &mut self.ranks[kill.victim];
        let lost = kill.queue_is_lost && !self.links[kill.victim].queue.is_empty();
        self.victim = Some((kill.victim, !rank.schedule.has_sends_left() && !lost));
        rank.state = State::Killed;
        if kill.queue_is_lost {
            self.links[kill.victim].queue.clear();
        }
        self.end_links(kill.victim);
    }

    fn end_links(&mut self, index: usize) {
        let prev = self.prev(index);
        self.links[index].sender_ended = true;
        self.links[prev].receiver_ended = true;
    }

    fn assert_ended(&self) {
        let case = self.case;
        for (index, rank) in self.ranks.iter().enumerate() {
            assert_ne!(rank.state, State::Running, "{case:?}: rank {index} hangs");
            if rank.state == State::Done {
                rank.assert_result(case);
            }
            if self.victim.is_none() {
                assert_eq!(rank.state, State::Done, "{case:?}: rank {index}");
            }
        }
        if let Some((victim, false)) = self.victim {
            let next = (victim + 1) % case.world;
            assert_ne!(self.ranks[next].state, State::Done, "{case:?}: rank {next} after {victim}");
        }
    }

    fn prev(&self, rank: usize) -> usize {
        (rank + self.case.world - 1) % self.case.world
    }

    /// All state that affects future events and results.
    fn fingerprint(&self) -> Vec<u64> {
        let mut all = Vec::new();
        let bits = |floats: &[f32]| {
            floats.iter().map(|float| float.to_bits().into()).collect::<Vec<u64>>()
        };
        let bytes = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).collect::<Vec<_>>();
        for (rank, link) in self.ranks.iter().zip(&self.links) {
            all.extend([
                rank.schedule.sent as u64,
                rank.schedule.received as u64,
                rank.state as u64,
            ]);
            all.extend(bits(&rank.dst));
            all.extend(rank.notes.iter().map(|note| note.len() as u64));
            all.push(rank.sending.is_some().into());
            all.extend(rank.sending.iter().flat_map(|(_, half)| bytes(half)));
            all.extend([
                link.sender_ended.into(),
                link.receiver_ended.into(),
                link.queue.len() as u64,
            ]);
            all.extend(link.queue.iter().flat_map(|message| bytes(&message.body)));
        }
        all
    }
}

impl Rank {
    fn new(case: Case, rank: usize) -> Self {
        let Case { world, span, operation } = case;
        let rank_info = RankInfo { rank, world };
        let src = contribution(rank, span.len);
        let (schedule, dst) = match operation {
            Operation::AllGather => (Schedule::all_gather(rank_info), Vec::new()),
            Operation::AllReduce => {
                (Schedule::all_reduce(rank_info, span), vec![f32::NAN; span.len])
            }
            Operation::Broadcast { root } => {
                let dst = if rank == root { src.clone() } else { vec![f32::NAN; span.len] };
                (Schedule::broadcast(rank_info, root, span, true), dst)
            }
        };
        let mut notes = vec![Vec::new(); world];
        notes[rank] = note(rank);
        Self { schedule, src, dst, notes, sending: None, state: State::Running }
    }

    fn with_payload<R>(&mut self, case: Case, act: impl FnOnce(&mut Payload<'_>) -> R) -> R {
        let body = match case.operation {
            Operation::AllGather => Body::Empty,
            Operation::AllReduce => Body::Sum { src: &self.src, dst: &mut self.dst },
            Operation::Broadcast { .. } => Body::Floats(&mut self.dst),
        };
        let mut payload = Payload::new(body, std::mem::take(&mut self.notes));
        let result = act(&mut payload);
        self.notes = payload.into_notes();
        result
    }

    fn assert_result(&self, case: Case) {
        let Case { world, span, operation } = case;
        let expected = match operation {
            Operation::AllGather => Vec::new(),
            // A group of one has no steps; the caller of the schedule copies the data.
            Operation::AllReduce if world == 1 => return,
            Operation::AllReduce => reference(world, span.len),
            Operation::Broadcast { root } => contribution(root, span.len),
        };
        let bits = |floats: &[f32]| floats.iter().map(|float| float.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&self.dst), bits(&expected), "{case:?}");
        match operation {
            Operation::Broadcast { root } => assert_eq!(self.notes[root], note(root), "{case:?}"),
            _ => assert_eq!(self.notes, (0..world).map(note).collect::<Vec<_>>(), "{case:?}"),
        }
    }
}

/// Numbers of such different magnitude that another order of addition gives other bits.
fn contribution(rank: usize, len: usize) -> Vec<f32> {
    let mut random = Random(rank as u64 + 1);
    (0..len)
        .map(|_| (random.below(1 << 20) as f32 + 0.1) * 2_f32.powi(random.below(24) as i32))
        .collect()
}

fn note(rank: usize) -> Vec<u8> {
    vec![rank as u8; rank % 4 + 1]
}

/// Reference: each chunk is summed around the ring, from its origin.
fn reference(world: usize, len: usize) -> Vec<f32> {
    let parts: Vec<_> = (0..world).map(|rank| contribution(rank, len)).collect();
    let mut sums = Vec::new();
    for origin in 0..world {
        for element in chunk::chunk(len, world, origin) {
            let ranks = (0..world).map(|hop| (origin + hop) % world);
            sums.push(ranks.map(|rank| parts[rank][element]).reduce(|sum, own| sum + own).unwrap());
        }
    }
    sums
}
