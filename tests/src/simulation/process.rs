//! A worker's process: its life, and its control thread, after `elasticdl_worker`'s `run` and `control`.

use std::collections::VecDeque;
use std::net::SocketAddr;

use elasticdl_master::job::{Exit, FromWorker, LaunchId, ToWorker};
use elasticdl_proto::WorkerId;

use super::clock::Micros;
use super::network::{LinkId, MASTER, Packet};
use super::ring::Endpoint;
use super::story::tell;
use super::trainer::Trainer;
use super::world::{Event, Setting, World};

/// One process, from its launch to its end and beyond.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) launch: LaunchId,
    pub(super) worker: Option<WorkerId>,
    /// How it ended.
    pub(super) exit: Option<Exit>,
    pub(super) paused: bool,
    /// What its threads are to do when it goes on.
    pub(super) deferred: Vec<Event>,
    /// A fault has touched it, so the master may think ill of it.
    pub(super) is_blemished: bool,
    /// The master has told the system to kill it.
    pub(super) is_doomed: bool,
    control: Control,
    woken: bool,
    pub(super) stream: Option<LinkId>,
    /// What the master said and the trainer has not looked at.
    pub(super) inbox: VecDeque<ToWorker>,
    /// What the trainer wants said.
    pub(super) outbox: VecDeque<FromWorker>,
    pub(super) endpoint: Endpoint,
    pub(super) trainer: Trainer,
}

/// Where the control thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    /// The trainer is done; the process ends with this code when the master has heard everything.
    Closing(i32),
    /// It has said hello.
    Greeting,
    /// The stream is open.
    Open,
    /// The stream is gone, since then.
    Outliving(Micros),
    /// It has not said hello.
    Starting,
}

impl Process {
    pub(super) fn new(launch: LaunchId, setting: &Setting) -> Self {
        Self {
            launch,
            worker: None,
            exit: None,
            paused: false,
            deferred: Vec::new(),
            is_blemished: false,
            is_doomed: false,
            control: Control::Starting,
            woken: false,
            stream: None,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            endpoint: Endpoint::default(),
            trainer: Trainer::new(setting),
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.exit.is_none()
    }
}

/// Where peers reach process `p`.
pub(super) fn address_of(p: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + p as u16))
}

/// The process that peers reach there.
pub(super) fn process_at(address: SocketAddr) -> usize {
    usize::from(address.port()) - 1000
}

impl World {
    // ---- life ----

    pub(super) fn on_start(&mut self, p: usize) {
        let launch = self.processes[p].launch;
        let link = self.net.open(p + 1, MASTER, true);
        let process = &mut self.processes[p];
        process.stream = Some(link);
        process.control = Control::Greeting;
        process.endpoint.open = true;
        self.send(link, p + 1, Packet::Hello(launch));
    }

    /// The process ends. Its kernel ends its links behind what was sent; `lossy`: and what was on its way is gone.
    pub(super) fn die(&mut self, p: usize, exit: Exit, lossy: bool) {
        if !self.processes[p].is_alive() {
            return;
        }
        tell!(
            self,
            "{}: ends, {exit:?}{}",
            self.name(p),
            if lossy { ", and what it sent is lost" } else { "" }
        );
        self.storm.has_harmed |= exit != Exit::Code(0);
        let process = &mut self.processes[p];
        process.exit = Some(exit);
        process.paused = false;
        process.deferred.clear();
        process.endpoint.open = false;
        for link in self.net.links_of(p + 1) {
            if lossy {
                self.lose_in_flight(link, p + 1);
            }
            self.shut(link, p + 1);
        }
        let delay = self.dice.between(50, 4000);
        self.clock.after(delay, Event::Reap { p });
    }

    pub(super) fn resume(&mut self, p: usize) {
        let process = &mut self.processes[p];
        process.paused = false;
        for event in std::mem::take(&mut process.deferred) {
            self.clock.after(1, event);
        }
    }

    pub(super) fn on_terminate(&mut self, p: usize) {
        tell!(self, "{}: gets SIGTERM", self.name(p));
        match self.processes[p].control {
            Control::Open => {
                self.say(p, FromWorker::Leaving);
                self.clock.after(LEAVE_TIMEOUT_US, Event::LeaveDue { p });
            }
            // The signal has its default effect until the stream is asked for.
            Control::Starting => self.die(p, Exit::Signal(15), false),
            Control::Greeting => self.processes[p].deferred.push(Event::Terminate { p }),
            Control::Outliving(_) => self.die(p, Exit::Code(EXIT_MASTER_LOST), false),
            Control::Closing(_) => {}
        }
    }

    pub(super) fn on_leave_due(&mut self, p: usize) {
        if !matches!(self.processes[p].control, Control::Closing(_)) {
            self.die(p, Exit::Code(EXIT_TERMINATED), false);
        }
    }

    // ---- the control thread ----

    pub(super) fn wake_control(&mut self, p: usize) {
        if !std::mem::replace(&mut self.processes[p].woken, true) {
            let delay = self.thread_delay();
            self.clock.after(delay, Event::Control { p });
        }
    }

    pub(super) fn on_control(&mut self, p: usize) {
        self.processes[p].woken = false;
        let Some(stream) = self.processes[p].stream else { return };
        while self.processes[p].is_alive()
            && let Some(packet) = self.net.take(stream, p + 1)
        {
            match packet {
                Packet::Welcome(worker) => self.on_welcome(p, worker),
                Packet::Down(message) => self.on_word(p, message),
                Packet::End => self.on_stream_end(p),
                other => self.violate(format!("{} got {other:?} on its stream", self.name(p))),
            }
        }
        while matches!(self.processes[p].control, Control::Open | Control::Closing(_))
            && let Some(message) = self.processes[p].outbox.pop_front()
        {
            self.say(p, message);
        }
        let process = &mut self.processes[p];
        if let (Control::Open, Some(code)) = (process.control, process.trainer.ended) {
            process.control = Control::Closing(code);
            self.shut(stream, p + 1);
            self.clock.after(CLOSE_TIMEOUT_US, Event::CloseDue { p });
        }
    }

    fn say(&mut self, p: usize, message: FromWorker) {
        if let Some(stream) = self.processes[p].stream {
            self.send(stream, p + 1, Packet::Up(message));
        }
    }

    fn on_welcome(&mut self, p: usize, worker: WorkerId) {
        let process = &mut self.processes[p];
        process.worker = Some(worker);
        process.control = Control::Open;
        for event in std::mem::take(&mut process.deferred) {
            self.clock.after(1, event);
        }
        self.clock.after(0, Event::Beat { p });
        self.begin_training(p);
    }

    fn on_word(&mut self, p: usize, message: ToWorker) {
        // What can't wait for the trainer's next look into its inbox: a lost member, the end.
        let abort_before = match &message {
            ToWorker::Membership(m) if m.abort => Some(m.generation.0),
            ToWorker::Shutdown(_) => Some(u64::MAX),
            _ => None,
        };
        let process = &mut self.processes[p];
        process.inbox.push_back(message);
        let waiting = process.inbox.len();
        self.wake_trainer(p);
        if let Some(generation) = abort_before {
            self.abort_before(p, generation);
        }
        if waiting > INBOX_MAX {
            self.violate(format!("{waiting} words wait in the inbox of {}", self.name(p)));
        }
    }

    fn on_stream_end(&mut self, p: usize) {
        match self.processes[p].control {
            Control::Starting | Control::Greeting => self.die(p, Exit::Code(EXIT_MASTER_LOST), false),
            Control::Closing(code) => self.die(p, Exit::Code(code), false),
            Control::Outliving(_) => {}
            Control::Open => {
                tell!(self, "{}: has lost the master", self.name(p));
                self.processes[p].control = Control::Outliving(self.clock.now());
                self.clock.after(MASTER_PROBE_US, Event::Probe { p });
            }
        }
    }

    pub(super) fn on_probe(&mut self, p: usize) {
        let Control::Outliving(since) = self.processes[p].control else { return };
        let is_over = self.clock.now() >= since + MASTER_TIMEOUT_US;
        if is_over || self.reaches_master(p) {
            return self.die(p, Exit::Code(EXIT_MASTER_LOST), false);
        }
        self.clock.after(MASTER_PROBE_US, Event::Probe { p });
    }

    pub(super) fn on_close_due(&mut self, p: usize) {
        if let Control::Closing(code) = self.processes[p].control {
            self.die(p, Exit::Code(code), false);
        }
    }

    pub(super) fn on_beat(&mut self, p: usize) {
        let Some(beat) = self.setting.spec.heartbeat() else { return };
        if self.processes[p].control == Control::Open {
            let stall = self.stall(p, beat);
            self.say(p, FromWorker::Alive(stall));
            self.clock.after(beat.as_micros() as Micros, Event::Beat { p });
        }
    }
}

const EXIT_MASTER_LOST: i32 = 70;
const EXIT_TERMINATED: i32 = 143;
const MASTER_PROBE_US: Micros = 200_000;
const MASTER_TIMEOUT_US: Micros = 30_000_000;
const CLOSE_TIMEOUT_US: Micros = 1_000_000;
const LEAVE_TIMEOUT_US: Micros = 5_000_000;
const INBOX_MAX: usize = 200;
