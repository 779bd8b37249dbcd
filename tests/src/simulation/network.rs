//! Links between hosts, as kernels keep them: bytes in order and late, until the link ends or is
//! lost.
//!
//! ```text
//!   ends[0] ── lane to 1: in flight ─▶ arrived (the receiver's kernel) ──▶ taken by a thread
//!           ◀─ lane to 0                                                         ends[1]
//! ```
//!
//! * What was sent before a process died still arrives, then the link's end; unless the crash takes
//!   it along.
//! * Between hosts that are cut off from each other nothing arrives, and nobody is told. What was
//!   sent meanwhile, the end included, arrives when they are not any more, as a kernel sends again
//!   and again.
//! * A link that is lost ends on both sides, and what was in flight is gone.
//! * A stopped process takes nothing; its kernel goes on.

use std::collections::VecDeque;
use std::rc::Rc;

use elasticdl_master::job::{FromWorker, LaunchId, Resume, ToWorker};
use elasticdl_proto::WorkerId;

use super::clock::Micros;
use super::fetch::Parcel;
use super::operation::Frame;
use super::world::{Event, World};

/// A machine: the master's is 0, process `n`'s is `n + 1`.
pub(super) type Host = usize;

pub(super) type LinkId = usize;

pub(super) const MASTER: Host = 0;

/// What travels. `Hello` to `Welcome` on control streams, `Dial` to `Frame` on links of rings,
/// `End` on both.
#[derive(Debug)]
pub(super) enum Packet {
    Hello(LaunchId, Option<Resume>),
    Refused,
    Up(FromWorker),
    Down(ToWorker),
    Welcome(WorkerId),
    Dial,
    Accepted,
    /// Without a generation: from a newcomer that wants the state.
    Introduction {
        generation: Option<u64>,
        from: WorkerId,
    },
    Frame(Rc<Frame>),
    Parcel(Rc<Parcel>),
    End,
}

#[derive(Debug)]
pub(super) struct Link {
    /// Whoever dialled, whoever was dialled.
    pub(super) ends: [Host; 2],
    pub(super) is_control: bool,
    /// Both ends have it: it is no dial any more.
    pub(super) is_settled: bool,
    is_lost: bool,
    /// To `ends[0]`, to `ends[1]`.
    lanes: [Lane; 2],
}

#[derive(Debug, Default)]
struct Lane {
    in_flight: VecDeque<Packet>,
    arrived: VecDeque<Packet>,
    last: Micros,
    /// The sender sends nothing more.
    shut: bool,
    /// Arrivals that were due while the hosts were cut off.
    stalled: u32,
}

/// All links there have ever been, and the state of the wires.
#[derive(Debug)]
pub(super) struct Network {
    links: Vec<Link>,
    cuts: Vec<(Host, Host)>,
    /// Factors on the latency of everything from or to a host.
    slow: Vec<(Host, u64)>,
    /// Mean one-way latency.
    pub(super) latency: Micros,
}

impl Network {
    pub(super) fn new(latency: Micros) -> Self {
        Self { links: Vec::new(), cuts: Vec::new(), slow: Vec::new(), latency }
    }

    pub(super) fn open(&mut self, from: Host, to: Host, is_control: bool) -> LinkId {
        let lanes = Default::default();
        self.links.push(Link {
            ends: [from, to],
            is_control,
            is_settled: is_control,
            is_lost: false,
            lanes,
        });
        self.links.len() - 1
    }

    pub(super) fn link(&self, link: LinkId) -> &Link {
        &self.links[link]
    }

    /// Takes what has arrived for `host`.
    pub(super) fn take(&mut self, link: LinkId, host: Host) -> Option<Packet> {
        let side = self.links[link].side(host);
        self.links[link].lanes[side].arrived.pop_front()
    }

    /// Whether the next thing that `host` would take is the link's end.
    pub(super) fn has_ended(&self, link: LinkId, host: Host) -> bool {
        let link = &self.links[link];
        matches!(link.lanes[link.side(host)].arrived.front(), Some(Packet::End))
    }

    /// What `host` has sent and nobody has taken.
    pub(super) fn waiting(&self, link: LinkId, host: Host) -> usize {
        let link = &self.links[link];
        let lane = &link.lanes[1 - link.side(host)];
        lane.in_flight.len() + lane.arrived.len()
    }

    pub(super) fn settle(&mut self, link: LinkId) {
        self.links[link].is_settled = true;
    }

    /// Whether `host` knows that the link is lost: sending fails.
    pub(super) fn is_reset(&self, link: LinkId, host: Host) -> bool {
        self.links[link].is_lost && self.has_ended(link, host)
    }

    pub(super) fn is_cut(&self, a: Host, b: Host) -> bool {
        self.cuts.iter().any(|&cut| cut == (a, b) || cut == (b, a))
    }

    pub(super) fn cut(&mut self, a: Host, b: Host) {
        self.cuts.push((a, b));
    }

    pub(super) fn slow_down(&mut self, host: Host, factor: u64) {
        self.slow.push((host, factor));
    }

    pub(super) fn speed_up(&mut self, host: Host) {
        self.slow.retain(|&(h, _)| h != host);
    }

    /// Links of `host` that have not ended on its side.
    pub(super) fn links_of(&self, host: Host) -> Vec<LinkId> {
        let open = |l: &Link| l.ends.contains(&host) && !l.lanes[1 - l.side(host)].shut;
        (0..self.links.len()).filter(|&id| open(&self.links[id])).collect()
    }

    fn factor(&self, link: LinkId) -> u64 {
        let ends = self.links[link].ends;
        self.slow
            .iter()
            .filter(|(host, _)| ends.contains(host))
            .map(|&(_, factor)| factor)
            .max()
            .unwrap_or(1)
    }
}

impl Link {
    fn side(&self, host: Host) -> usize {
        usize::from(self.ends[1] == host)
    }

    pub(super) fn peer(&self, host: Host) -> Host {
        self.ends[1 - self.side(host)]
    }
}

impl World {
    /// Sends from `host`; lost without a word where `host` has shut the link.
    pub(super) fn send(&mut self, link: LinkId, host: Host, packet: Packet) {
        let mean = self.net.latency * self.net.factor(link);
        let late = if self.dice.chance(1, 50) { 10 } else { 1 };
        let latency = (mean / 2 + self.dice.below(mean)) * late;
        let now = self.clock.now();
        let l = &mut self.net.links[link];
        let to = 1 - l.side(host);
        let lane = &mut l.lanes[to];
        if lane.shut {
            return;
        }
        lane.shut = matches!(packet, Packet::End);
        lane.last = lane.last.max(now + latency);
        lane.in_flight.push_back(packet);
        let waiting = lane.in_flight.len() + lane.arrived.len();
        self.clock.at(lane.last, Event::Arrive { link, to });
        if waiting > QUEUE_MAX {
            self.violate(format!("{waiting} packets wait on one link"));
        }
    }

    /// `host` shuts its side: the peer sees the end behind all that was sent.
    pub(super) fn shut(&mut self, link: LinkId, host: Host) {
        self.send(link, host, Packet::End);
    }

    /// What `host` has sent and what has not arrived yet is gone.
    pub(super) fn lose_in_flight(&mut self, link: LinkId, host: Host) {
        let l = &mut self.net.links[link];
        let to = 1 - l.side(host);
        l.lanes[to].in_flight.clear();
    }

    /// The link breaks: both sides see its end, and nothing else.
    pub(super) fn lose(&mut self, link: LinkId) {
        self.net.links[link].is_lost = true;
        for host in self.net.links[link].ends {
            self.lose_in_flight(link, host);
            // An orderly end that was on its way is gone as well.
            let to = 1 - self.net.links[link].side(host);
            self.net.links[link].lanes[to].shut = false;
            self.shut(link, host);
        }
    }

    pub(super) fn heal(&mut self, a: Host, b: Host) {
        self.net.cuts.retain(|&cut| cut != (a, b) && cut != (b, a));
        for link in 0..self.net.links.len() {
            if self.net.links[link].ends != [a, b] && self.net.links[link].ends != [b, a] {
                continue;
            }
            for to in 0..2 {
                let stalled = std::mem::take(&mut self.net.links[link].lanes[to].stalled);
                if stalled > 0 {
                    // The kernel tries again after a while, and then everything comes at once.
                    let again = self.clock.now() + self.dice.below(200_000);
                    self.net.links[link].lanes[to].last = again;
                    (0..stalled).for_each(|_| self.clock.at(again, Event::Arrive { link, to }));
                }
            }
        }
    }

    pub(super) fn on_arrive(&mut self, link: LinkId, to: usize) {
        let [a, b] = self.net.links[link].ends;
        let is_cut = self.net.is_cut(a, b);
        let lane = &mut self.net.links[link].lanes[to];
        if is_cut {
            lane.stalled += 1;
            return;
        }
        let Some(packet) = lane.in_flight.pop_front() else { return };
        let host = self.net.links[link].ends[to];
        if matches!(packet, Packet::Dial) {
            return self.on_dialled(link, host);
        }
        let introduces = matches!(packet, Packet::Introduction { .. });
        self.net.links[link].lanes[to].arrived.push_back(packet);
        match host.checked_sub(1) {
            None => self.on_master_input(link),
            Some(p) if self.net.links[link].is_control => self.wake_control(p),
            Some(p) if introduces => {
                let delay = self.thread_delay();
                self.clock.after(delay, Event::Porter { p, link });
            }
            Some(p) => self.wake_trainer_for(p, link),
        }
    }

    /// The kernel answers, whatever its process does.
    fn on_dialled(&mut self, link: LinkId, host: Host) {
        let listens = host.checked_sub(1).is_some_and(|p| self.processes[p].endpoint.open);
        self.send(link, host, if listens { Packet::Accepted } else { Packet::End });
    }
}

/// No queue of a job this small grows longer.
const QUEUE_MAX: usize = 4000;
