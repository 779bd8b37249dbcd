//! A worker's process: its life, and its control thread, after `elasticdl_worker`'s `run` and
//! `control`.

use std::collections::VecDeque;
use std::net::SocketAddr;

use elasticdl_master::job::{Exit, FromWorker, LaunchId, Resume, ToWorker};
use elasticdl_proto::{Generation, WorkerId};

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
    /// The place that it was started at.
    pub(super) index: u32,
    pub(super) worker: Option<WorkerId>,
    /// How it ended.
    pub(super) exit: Option<Exit>,
    /// Of a pod's first process: how the first of the pod that failed has ended.
    pub(super) pod_failure: Option<Exit>,
    pub(super) paused: bool,
    /// What its threads are to do when it goes on.
    pub(super) deferred: Vec<Event>,
    /// A fault has touched it, so the master may think ill of it.
    pub(super) is_blemished: bool,
    /// A fault has touched what is between it and the master, or the master.
    pub(super) lost_contact: bool,
    /// The newest generation when its links broke last.
    pub(super) broke_in: Generation,
    /// Another master than the one of now has started it.
    pub(super) is_adopted: bool,
    /// The master has told the system to kill it.
    pub(super) is_doomed: bool,
    control: Control,
    woken: bool,
    pub(super) stream: Option<LinkId>,
    /// What the master said and the trainer has not looked at.
    pub(super) inbox: VecDeque<Word>,
    /// Who it is, for a master that comes after this one.
    me: Option<Resume>,
    /// What the trainer says is meant for this master, and not for the one before.
    is_current: bool,
    /// It was told to end, and every master is to know.
    leaves: bool,
    /// It was shut down: no other master is of interest.
    is_over: bool,
    /// What the trainer wants said.
    pub(super) outbox: VecDeque<FromWorker>,
    pub(super) endpoint: Endpoint,
    pub(super) trainer: Trainer,
}

/// What the control thread passes on to the trainer.
#[derive(Debug)]
pub(super) enum Word {
    /// Another master is there; it knows nothing of what was said to the one before.
    Reconnected,
    Said(ToWorker),
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
    /// It has said hello to another master.
    Returning { since: Micros, pause: Micros },
    /// The stream is gone, since then; it looks for another master after the pause.
    Searching { since: Micros, pause: Micros },
    /// It has not said hello.
    Starting,
}

impl Process {
    pub(super) fn new(launch: LaunchId, index: u32, setting: &Setting) -> Self {
        Self {
            launch,
            index,
            worker: None,
            exit: None,
            pod_failure: None,
            paused: false,
            deferred: Vec::new(),
            is_blemished: false,
            lost_contact: false,
            broke_in: Generation::default(),
            is_adopted: false,
            is_doomed: false,
            control: Control::Starting,
            woken: false,
            stream: None,
            inbox: VecDeque::new(),
            me: None,
            is_current: true,
            leaves: false,
            is_over: false,
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
        self.send(link, p + 1, Packet::Hello(launch, None));
    }

    /// The process ends. Its kernel ends its links behind what was sent; `lossy`: and what was on
    /// its way is gone.
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
        self.supervise(p);
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
            // The signal has its default effect until the stream is asked for.
            Control::Starting => return self.die(p, Exit::Signal(15), false),
            Control::Greeting => return self.processes[p].deferred.push(Event::Terminate { p }),
            Control::Closing(_) => return,
            Control::Open | Control::Returning { .. } | Control::Searching { .. } => {}
        }
        if !std::mem::replace(&mut self.processes[p].leaves, true) {
            let timeout = self.setting.spec.leave_timeout().as_micros() as Micros;
            self.clock.after(timeout, Event::LeaveDue { p });
        }
        if self.processes[p].control == Control::Open && self.processes[p].is_current {
            self.say(p, FromWorker::Leaving);
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
                Packet::End => self.on_stream_end(p, false),
                Packet::Refused => self.on_stream_end(p, true),
                other => self.violate(format!("{} got {other:?} on its stream", self.name(p))),
            }
        }
        while !matches!(self.processes[p].control, Control::Starting | Control::Greeting)
            && let Some(message) = self.processes[p].outbox.pop_front()
        {
            self.pass_on(p, message);
        }
        let process = &mut self.processes[p];
        let Some(code) = process.trainer.ended else { return };
        match process.control {
            Control::Open => {
                process.control = Control::Closing(code);
                self.shut(stream, p + 1);
                self.clock.after(CLOSE_TIMEOUT_US, Event::CloseDue { p });
            }
            Control::Returning { .. } | Control::Searching { .. } => {
                self.die(p, Exit::Code(code), false)
            }
            Control::Closing(_) | Control::Greeting | Control::Starting => {}
        }
    }

    /// Tells the master what the trainer says. What the trainer said before it knew of this master
    /// is dropped: it says again what still matters, and first what it holds.
    fn pass_on(&mut self, p: usize, message: FromWorker) {
        let process = &mut self.processes[p];
        if let (FromWorker::Ready { parameters }, Some(me)) = (&message, &mut process.me) {
            me.parameters = Some(*parameters);
        }
        if process.control != Control::Open {
            return;
        }
        let is_first = matches!(message, FromWorker::Holding { .. }) && !process.is_current;
        process.is_current |= is_first;
        let (is_current, leaves) = (process.is_current, process.leaves);
        if is_current {
            self.say(p, message);
        }
        if is_first && leaves {
            self.say(p, FromWorker::Leaving);
        }
    }

    fn say(&mut self, p: usize, message: FromWorker) {
        if let Some(stream) = self.processes[p].stream {
            self.send(stream, p + 1, Packet::Up(message));
        }
    }

    fn on_welcome(&mut self, p: usize, worker: WorkerId) {
        let process = &mut self.processes[p];
        if let Control::Returning { .. } = process.control {
            process.control = Control::Open;
            process.is_current = false;
            process.inbox.push_back(Word::Reconnected);
            tell!(self, "{}: has found another master", self.name(p));
            return self.wake_trainer(p);
        }
        process.worker = Some(worker);
        process.me = Some(Resume { worker, membership: None, parameters: None });
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
        match (&message, &mut process.me) {
            (ToWorker::Membership(m), Some(me)) if m.generation > me.generation() => {
                me.membership = Some(m.clone());
            }
            (ToWorker::Shutdown(_), _) => process.is_over = true,
            _ => {}
        }
        process.inbox.push_back(Word::Said(message));
        let waiting = process.inbox.len();
        self.wake_trainer(p);
        if let Some(generation) = abort_before {
            self.abort_before(p, generation);
        }
        if waiting > INBOX_MAX {
            self.violate(format!("{waiting} words wait in the inbox of {}", self.name(p)));
        }
    }

    fn on_stream_end(&mut self, p: usize, is_refused: bool) {
        match self.processes[p].control {
            Control::Starting | Control::Greeting => {
                self.die(p, Exit::Code(EXIT_MASTER_LOST), false)
            }
            Control::Closing(code) => self.die(p, Exit::Code(code), false),
            Control::Searching { .. } => {}
            Control::Returning { .. } if is_refused => {
                self.die(p, Exit::Code(EXIT_MASTER_LOST), false)
            }
            Control::Returning { since, pause } => self.search(p, since, pause),
            Control::Open => {
                tell!(self, "{}: has lost the master", self.name(p));
                self.search(p, self.clock.now(), RETRY_FIRST_US);
            }
        }
    }

    fn search(&mut self, p: usize, since: Micros, pause: Micros) {
        self.processes[p].control =
            Control::Searching { since, pause: (pause * 2).min(RETRY_MAX_US) };
        self.clock.after(pause, Event::Probe { p });
        self.wake_control(p);
    }

    pub(super) fn on_probe(&mut self, p: usize) {
        let Control::Searching { since, pause } = self.processes[p].control else { return };
        if self.clock.now() >= since + MASTER_TIMEOUT_US {
            return self.die(p, Exit::Code(EXIT_MASTER_LOST), false);
        }
        if self.processes[p].is_over || !self.reaches_master(p) {
            return self.search(p, since, pause);
        }
        let link = self.net.open(p + 1, MASTER, true);
        let process = &mut self.processes[p];
        process.stream = Some(link);
        process.control = Control::Returning { since, pause };
        let (launch, me) = (process.launch, process.me.clone());
        self.send(link, p + 1, Packet::Hello(launch, me));
    }

    /// A ping on the stream has not been answered for as long as one may take.
    pub(super) fn on_keep_alive(&mut self, p: usize, link: LinkId) {
        let process = &self.processes[p];
        let is_open = matches!(process.control, Control::Open | Control::Returning { .. });
        let is_mute = self.master.paused || self.net.is_cut(MASTER, p + 1);
        if process.stream == Some(link) && is_open && is_mute {
            self.shut(link, p + 1);
            self.on_stream_end(p, false);
        }
    }

    pub(super) fn on_close_due(&mut self, p: usize) {
        if let Control::Closing(code) = self.processes[p].control {
            self.die(p, Exit::Code(code), false);
        }
    }

    pub(super) fn on_beat(&mut self, p: usize) {
        let Some(beat) = self.setting.spec.heartbeat() else { return };
        let is_gone = matches!(self.processes[p].control, Control::Closing(_));
        if self.processes[p].control == Control::Open {
            let stall = self.stall(p, beat);
            self.say(p, FromWorker::Alive(stall));
        }
        if !is_gone {
            self.clock.after(beat.as_micros() as Micros, Event::Beat { p });
        }
    }
}

const EXIT_MASTER_LOST: i32 = 70;
const EXIT_TERMINATED: i32 = 143;
const RETRY_FIRST_US: Micros = 50_000;
const RETRY_MAX_US: Micros = 1_000_000;
const MASTER_TIMEOUT_US: Micros = 30_000_000;
const CLOSE_TIMEOUT_US: Micros = 1_000_000;
const INBOX_MAX: usize = 200;
