//! What a search may decide in a run: which fault hits the job at which point.
//!
//! A point is the moment before an event. A fault of a process is possible before each turn of the
//! process, a cut before each delivery over one of the links that it cuts, a fault of the master
//! before each of its turns and between two of its actions: any other moment is equal to one of
//! these.

use std::fmt;
use std::str::FromStr;

use elasticdl_master::job::Event as JobEvent;

use super::clock::Micros;
use super::state::event::Event;
use super::state::faults::Undo;
use super::state::network::{Host, MASTER};
use super::state::process::Control;
use super::trace::trace;
use super::world::World;

/// A fault, or a delay. Workers are numbered in the order of their starts, from 1; 0 is the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// No packet passes between two hosts, for twice the worker timeout.
    Cut(usize, usize),
    /// The user wants one worker more.
    Join,
    /// A worker is killed.
    Kill(usize),
    /// The master is killed after so many actions of its next turn, and restarted half a worker
    /// timeout later.
    KillMaster(u64),
    /// The next event happens a millisecond later.
    Late,
    /// A worker gets SIGTERM.
    Leave(usize),
    /// A worker is stopped for half the worker timeout.
    Pause(usize),
    /// A worker is stopped for twice the worker timeout.
    Stop(usize),
}

/// A choice, and the number of events before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// Number of events that come before it.
    pub at: u64,
    /// What happens there.
    pub choice: Choice,
}

impl World {
    /// What may happen before `event`, the next one.
    pub(super) fn choices(&self, event: &Event) -> Vec<Choice> {
        match *event {
            Event::Arrive { link, to } => {
                let link = self.net.link(link);
                let [a, b] = link.ends;
                if link.directions[to].in_flight.is_empty() || self.net.is_cut(a, b) {
                    return Vec::new();
                }
                let is_alive =
                    |host: Host| host.checked_sub(1).is_none_or(|p| self.processes[p].is_alive());
                if is_alive(a) && is_alive(b) {
                    vec![Choice::Cut(a.min(b), a.max(b)), Choice::Late]
                } else {
                    vec![Choice::Late]
                }
            }
            Event::Master if self.master.is_alive && !self.master.paused => {
                let joins = (!self.fault_plan.has_scaled).then_some(Choice::Join);
                [Choice::KillMaster(0), Choice::Late].into_iter().chain(joins).collect()
            }
            _ => match event.runs_in() {
                Some(p) if self.is_effective(p, event) => {
                    let host = p + 1;
                    let own =
                        [Choice::Kill(host), Choice::Pause(host), Choice::Stop(host), Choice::Late];
                    let process = &self.processes[p];
                    let may_leave = !process.control_state.is_leaving()
                        && !matches!(process.control, Control::Closing(_) | Control::Handshaking);
                    own.into_iter().chain(may_leave.then_some(Choice::Leave(host))).collect()
                }
                _ => Vec::new(),
            },
        }
    }

    /// Whether `p` does anything when `event` happens.
    pub(super) fn is_effective(&self, p: usize, event: &Event) -> bool {
        let process = &self.processes[p];
        let is_due = match *event {
            Event::Thread { thread, ticket } => process.threads[thread.number].ticket == ticket,
            Event::CloseDue { .. } => matches!(process.control, Control::Closing(_)),
            Event::KeepAlive { link, .. } => process.stream == Some(link),
            _ => true,
        };
        process.is_alive() && !process.paused && is_due
    }

    /// Makes a choice before the next event.
    pub(super) fn decide(&mut self, choice: Choice) {
        trace!(self, "CHOICE: {choice}");
        self.oracle.coverage.faults += 1;
        self.fault_plan.healed_since = None;
        let timeout = self
            .setting
            .spec
            .options
            .worker_timeout
            .map_or(0, |timeout| timeout.as_micros() as Micros);
        let plan = &mut self.fault_plan;
        plan.links_may_break |= matches!(choice, Choice::Cut(1.., _) | Choice::Kill(_));
        plan.heals_after = match choice {
            Choice::Cut(..) | Choice::Stop(_) => Some(timeout * 2),
            _ => Some(timeout / 2),
        };
        match choice {
            Choice::Cut(MASTER, host) => self.cut_master_from(vec![host - 1]),
            Choice::Cut(a, b) => self.cut(vec![(a, b)]),
            Choice::Join => {
                self.fault_plan.has_scaled = true;
                let num_workers = self.setting.spec.num_workers + 1;
                self.command(JobEvent::Scale(num_workers.into()));
            }
            Choice::Kill(host) => self.crash(host - 1),
            Choice::KillMaster(0) => self.crash_master(),
            Choice::KillMaster(actions) => self.master.dies_after = Some(actions),
            Choice::Late => self.delay_next(),
            Choice::Leave(host) => self.dispatch(Event::Terminate { p: host - 1 }),
            Choice::Pause(host) | Choice::Stop(host) => {
                let p = host - 1;
                self.processes[p].paused = true;
                self.processes[p].is_degraded = true;
                self.heal_later(Undo::Continue(p));
            }
        }
    }

    /// The next event happens later, and so do all deliveries on its link.
    fn delay_next(&mut self) {
        if let Some(&Event::Arrive { link, to }) = self.clock.peek() {
            let is_same = |other: &Event| match *other {
                Event::Arrive { link: of, to: side } => (of, side) == (link, to),
                _ => false,
            };
            let until = self.clock.delay(LATE_US, is_same);
            let last = &mut self.net.links[link].directions[to].last;
            *last = until.max(*last);
        } else if let Some(event) = self.clock.next() {
            self.clock.after(LATE_US, event);
        }
    }
}

impl Choice {
    /// The worker that it hits, if it hits only one.
    pub(super) fn worker(self) -> Option<usize> {
        match self {
            Self::Cut(MASTER, host)
            | Self::Kill(host)
            | Self::Leave(host)
            | Self::Pause(host)
            | Self::Stop(host) => Some(host),
            Self::Cut(..) | Self::Join | Self::KillMaster(_) | Self::Late => None,
        }
    }

    /// The same for any worker.
    pub(super) fn of_any(self) -> Self {
        match self {
            Self::Cut(MASTER, _) => Self::Cut(MASTER, 0),
            Self::Kill(_) => Self::Kill(0),
            Self::Leave(_) => Self::Leave(0),
            Self::Pause(_) => Self::Pause(0),
            Self::Stop(_) => Self::Stop(0),
            other => other,
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut(a, b) => write!(f, "cut {a} {b}"),
            Self::Join => f.write_str("join"),
            Self::Kill(worker) => write!(f, "kill {worker}"),
            Self::KillMaster(actions) => write!(f, "kill-master {actions}"),
            Self::Late => f.write_str("late"),
            Self::Leave(worker) => write!(f, "leave {worker}"),
            Self::Pause(worker) => write!(f, "pause {worker}"),
            Self::Stop(worker) => write!(f, "stop {worker}"),
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.at, self.choice)
    }
}

impl FromStr for Decision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no decision, such as `120 kill 2` or `40 cut 1 2`");
        let mut words = text.split_whitespace();
        let number = |words: &mut std::str::SplitWhitespace<'_>| {
            words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)
        };
        let at = number(&mut words)?;
        let name = words.next().ok_or_else(wrong)?;
        let mut worker = || number(&mut words).map(|host: u64| host as usize);
        let choice = match name {
            "cut" => Choice::Cut(worker()?, worker()?),
            "join" => Choice::Join,
            "kill" => Choice::Kill(worker()?),
            "kill-master" => Choice::KillMaster(worker()? as u64),
            "late" => Choice::Late,
            "leave" => Choice::Leave(worker()?),
            "pause" => Choice::Pause(worker()?),
            "stop" => Choice::Stop(worker()?),
            _ => return Err(wrong()),
        };
        Ok(Self { at, choice })
    }
}

/// How much later the next event happens: longer than all that is under way without a fault.
const LATE_US: Micros = 1000;
