//! A worker's process: its lifetime, and its control thread around the real [`ControlState`].

use std::sync::atomic::Ordering;

use elasticdl::simulated::ControlEvent;
use elasticdl_master::job::{Exit, MasterMessage, WorkerMessage};
use elasticdl_proto::{Heartbeat, Welcome, WorkerId};

use super::clock::Micros;
use super::machine::instant;
use super::state::event::Event;
use super::state::network::{LinkId, MASTER};
use super::state::packet::Packet;
use super::state::process::{Control, EXIT_MASTER_LOST, EXIT_TERMINATED, Process};
use super::timeless::Timeless;
use super::trace::trace;
use super::world::World;

impl World {
    // ---- lifetime ----

    pub(super) fn on_start(&mut self, p: usize) {
        if self.setting.bad_host == Some(self.processes[p].host) {
            self.oracle.coverage.bad_starts += 1;
            return self.die(p, Exit::Code(1), false);
        }
        if self.fault_plan.storms {
            let delay = self.rng.between(1, 2_000_000);
            self.clock.after(delay, Event::Die { p, signal: 9 });
        }
        let launch = self.processes[p].launch;
        let link = self.dial_master(p);
        let process = &mut self.processes[p];
        process.stream = Some(link);
        process.control = Control::Handshaking;
        process.endpoint.open = true;
        self.send(link, p + 1, Packet::Hello(launch, None, 0));
    }

    /// Ends the process. Its kernel ends its links after what was sent; `lossy`: and drops what is
    /// in flight.
    pub(super) fn die(&mut self, p: usize, exit: Exit, lossy: bool) {
        if !self.processes[p].is_alive() {
            return;
        }
        trace!(
            self,
            "{}: ends, {exit:?}{}",
            self.name(p),
            if lossy { ", and what it sent is lost" } else { "" }
        );
        self.fault_plan.links_may_break |= exit != Exit::Code(0);
        self.note_exit(&exit, self.processes[p].worker.is_some());
        let process = &mut self.processes[p];
        process.exit = Some(exit);
        process.paused = false;
        process.deferred.clear();
        process.endpoint.open = false;
        self.end_threads(p);
        for link in self.net.links_of(p + 1) {
            if lossy {
                self.lose_in_flight(link, p + 1);
            }
            self.shut(link, p + 1);
        }
        self.supervise(p);
        let delay = self.rng.between(50, 4000);
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
        trace!(self, "{}: gets SIGTERM", self.name(p));
        match self.processes[p].control {
            // The signal has its default disposition until the stream is requested.
            Control::Starting => return self.die(p, Exit::Signal(15), false),
            Control::Handshaking => return self.processes[p].deferred.push(Event::Terminate { p }),
            Control::Closing(_) => return,
            Control::Open | Control::Reconnecting { .. } | Control::Searching { .. } => {}
        }
        let state = &mut self.processes[p].control_state;
        if !state.is_leaving() {
            let timeout = self.setting.spec.options.leave_timeout().as_micros() as Micros;
            self.clock.after(timeout, Event::LeaveDue { p });
        }
        if let Some(leaving) = self.processes[p].control_state.terminate() {
            self.send_to_master(p, leaving);
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
        while self.processes[p].is_alive()
            && let Some(stream) = self.processes[p].stream
            && let Some(packet) = self.net.take(stream, p + 1)
        {
            match packet {
                Packet::Welcome(worker, incarnation) => self.on_welcome(p, worker, incarnation),
                Packet::Down(message) => self.on_message(p, message),
                Packet::End => self.on_stream_end(p, false),
                Packet::Refused => self.on_stream_end(p, true),
                other => self.violate(format!("{} got {other:?} on its stream", self.name(p))),
            }
        }
        while !matches!(self.processes[p].control, Control::Starting | Control::Handshaking)
            && let Some(message) = self.processes[p].outbox.pop_front()
        {
            self.forward(p, message);
        }
        let process = &mut self.processes[p];
        let Some(code) = process.trainer.ended else { return };
        match process.control {
            Control::Open => {
                process.control = Control::Closing(code);
                if let Some(stream) = process.stream {
                    self.shut(stream, p + 1);
                }
                self.clock.after(CLOSE_TIMEOUT_US, Event::CloseDue { p });
            }
            Control::Reconnecting { .. } | Control::Searching { .. } => {
                self.die(p, Exit::Code(code), false)
            }
            Control::Closing(_) | Control::Handshaking | Control::Starting => {}
        }
    }

    /// Sends a message of the trainer to the master.
    fn forward(&mut self, p: usize, message: WorkerMessage) {
        for message in self.processes[p].control_state.forward(message) {
            self.send_to_master(p, message);
        }
    }

    fn send_to_master(&mut self, p: usize, message: WorkerMessage) {
        if let Some(stream) = self.processes[p].stream {
            self.send(stream, p + 1, Packet::Up(message));
        }
    }

    fn on_welcome(&mut self, p: usize, worker: WorkerId, incarnation: u64) {
        let options = self.setting.spec.options.clone();
        let serves_tables = self.serves_tables(p);
        let welcome = Welcome { worker, incarnation, serves_tables, options };
        let process = &mut self.processes[p];
        let newest = process.control_state.incarnation();
        process.control = Control::Open;
        let accepted = process.control_state.handle_welcome(&welcome);
        match accepted {
            Ok(_) if incarnation < newest => {
                let what = format!("follows master {incarnation} after master {newest}");
                return self.violate(format!("{} {what}", self.name(p)));
            }
            Ok(false) => process.worker = Some(worker),
            Ok(true) => {
                trace!(self, "{}: has found another master", self.name(p));
                return self.tell_trainer(p, ControlEvent::Reconnected);
            }
            Err(error) => return self.violate(format!("{}: {error}", self.name(p))),
        }
        for event in std::mem::take(&mut process.deferred) {
            self.clock.after(1, event);
        }
        self.clock.after(0, Event::Heartbeat { p });
        self.start_trainer(p, worker);
    }

    fn on_message(&mut self, p: usize, message: MasterMessage) {
        let process = &mut self.processes[p];
        let abort_before = process.control_state.handle_message(&message);
        self.tell_trainer(p, ControlEvent::Message(message, instant(self.clock.now())));
        if let Some(generation) = abort_before {
            self.abort_before(p, generation);
        }
    }

    fn tell_trainer(&mut self, p: usize, event: ControlEvent) {
        let trainer = &mut self.processes[p].trainer;
        let Some(inbox) = &trainer.inbox else { return };
        if self.setting.is_explored {
            trainer.told[1] = Timeless::number_of(&(trainer.told[1], &event));
        }
        // A trainer that has ended needs no message.
        let _ = inbox.send(event);
        trainer.news += 1;
        if trainer.news > INBOX_MAX {
            let waiting = trainer.news;
            self.violate(format!("the inbox of {} holds {waiting} messages", self.name(p)));
        }
        self.wake_for_news(p);
    }

    fn on_stream_end(&mut self, p: usize, is_refused: bool) {
        match self.processes[p].control {
            Control::Starting | Control::Handshaking => {
                self.die(p, Exit::Code(EXIT_MASTER_LOST), false)
            }
            Control::Closing(code) => self.die(p, Exit::Code(code), false),
            Control::Searching { .. } => {}
            Control::Reconnecting { .. } if is_refused => {
                self.die(p, Exit::Code(EXIT_MASTER_LOST), false)
            }
            Control::Reconnecting { since, pause } => self.search(p, since, pause),
            Control::Open => {
                trace!(self, "{}: has lost the master", self.name(p));
                self.search(p, self.clock.now(), RETRY_FIRST_US);
            }
        }
    }

    fn search(&mut self, p: usize, since: Micros, pause: Micros) {
        let process = &mut self.processes[p];
        process.control = Control::Searching { since, pause: (pause * 2).min(RETRY_MAX_US) };
        // What still arrives on the stream is not read.
        process.stream = None;
        process.control_state.handle_stream_end();
        self.clock.after(pause, Event::Probe { p });
        self.wake_control(p);
    }

    pub(super) fn on_probe(&mut self, p: usize) {
        let Control::Searching { since, pause } = self.processes[p].control else { return };
        if self.clock.now() >= since + MASTER_TIMEOUT_US {
            return self.die(p, Exit::Code(EXIT_MASTER_LOST), false);
        }
        if self.processes[p].control_state.is_over() || !self.reaches_master(p) {
            return self.search(p, since, pause);
        }
        let link = self.dial_master(p);
        let process = &mut self.processes[p];
        process.stream = Some(link);
        process.control = Control::Reconnecting { since, pause };
        let Process { launch, control_state, trainer, .. } = process;
        if trainer.holds_state.load(Ordering::Relaxed) {
            control_state.note_state();
        }
        let hello =
            Packet::Hello(*launch, control_state.identity().cloned(), control_state.incarnation());
        self.send(link, p + 1, hello);
    }

    /// A ping on the stream has not been answered within the keep-alive timeout.
    pub(super) fn on_keep_alive(&mut self, p: usize, link: LinkId) {
        let process = &self.processes[p];
        let is_open = matches!(process.control, Control::Open | Control::Reconnecting { .. });
        let is_unreachable = self.hangs(link) || self.net.is_cut(MASTER, p + 1);
        if process.stream == Some(link) && is_open && is_unreachable {
            self.shut(link, p + 1);
            self.on_stream_end(p, false);
        }
    }

    pub(super) fn on_close_due(&mut self, p: usize) {
        if let Control::Closing(code) = self.processes[p].control {
            self.die(p, Exit::Code(code), false);
        }
    }

    pub(super) fn on_heartbeat(&mut self, p: usize) {
        let Some(heartbeat) = self.setting.spec.options.heartbeat() else { return };
        let is_gone = matches!(self.processes[p].control, Control::Closing(_));
        if self.processes[p].control == Control::Open {
            let stall = self.stall(p, heartbeat);
            let trainer = &self.processes[p].trainer;
            let holds_state = trainer.holds_state.load(Ordering::Relaxed);
            let step = trainer.inbox.as_ref().map(|_| trainer.state().map_or(0, |s| s.step));
            let heartbeat = Heartbeat { stall, holds_state, step, ..Heartbeat::default() };
            self.send_to_master(p, WorkerMessage::Heartbeat(heartbeat));
        }
        if !is_gone {
            self.clock.after(heartbeat.as_micros() as Micros, Event::Heartbeat { p });
        }
    }
}

const RETRY_FIRST_US: Micros = 50_000;

const RETRY_MAX_US: Micros = 1_000_000;

const MASTER_TIMEOUT_US: Micros = 30_000_000;

const CLOSE_TIMEOUT_US: Micros = 1_000_000;

const INBOX_MAX: usize = 200;
