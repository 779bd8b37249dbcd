//! Sends the state to one joining worker, over one link or several, in a thread of its own.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use elasticdl_collective::Position;
use elasticdl_proto::Generation;

use super::{
    KIND_CAUGHT_UP, KIND_END, KIND_PART, KIND_RESULT, KIND_STATE, PartNote, QUEUED_RESULTS_MAX,
    Snapshot, StateMessage, StateNote, digest,
};
use crate::machine::{Machine, Request, Sender, receive};
use crate::session::header;

/// Transfer of a snapshot and the results after it to one joining worker.
///
/// **Invariant:** everything that the joiner may not have received is retained, so that a transfer
/// whose link breaks resumes at the joiner's position: the snapshot until the joiner has all of it,
/// a result until the joiner has applied it.
#[derive(Debug)]
pub(super) struct Delivery {
    joiner: u64,
    idle_timeout: Duration,
    part_floats: usize,
    generation: Generation,
    note: StateNote,
    floats: usize,
    snapshot: Option<Arc<Snapshot>>,
    /// Number of floats of the snapshot that are sent.
    sent_floats: usize,
    /// Results that the joiner has not applied, as far as is known.
    results: VecDeque<StateMessage>,
    /// Number of these results that are sent.
    sent_results: usize,
    /// Step of the first result that is, or will be, in `results`.
    first_step: u64,
    queue: Receiver<StateMessage>,
    links: Receiver<Box<dyn Request>>,
    machine: Arc<dyn Machine>,
}

impl Delivery {
    pub(super) fn new(
        (joiner, idle_timeout, part_floats): (u64, Duration, usize),
        (generation, note): (Generation, StateNote),
        snapshot: Arc<Snapshot>,
        (queue, links): (Receiver<StateMessage>, Receiver<Box<dyn Request>>),
        machine: Arc<dyn Machine>,
    ) -> Self {
        Self {
            joiner,
            idle_timeout,
            part_floats,
            generation,
            floats: snapshot.parameters_len + snapshot.slots_len,
            snapshot: Some(snapshot),
            sent_floats: 0,
            results: VecDeque::new(),
            sent_results: 0,
            first_step: note.record.step,
            note,
            queue,
            links,
            machine,
        }
    }

    /// Sends until the trainer ends the stream or the joiner does not reconnect in time.
    pub(super) fn run(mut self, mut request: Box<dyn Request>) {
        loop {
            let mut sender = request.serve(self.idle_timeout);
            match self.deliver(&mut *sender) {
                Ok(()) => {
                    drop(self);
                    return sender.finish();
                }
                Err(error) => {
                    tracing::info!(joiner = self.joiner, %error, "the link to a joiner broke");
                }
            }
            drop(sender);
            match receive(&*self.machine, &self.links, RETURN_WINDOW) {
                Ok(again) => request = again,
                Err(_) => return,
            }
        }
    }

    fn deliver(&mut self, sender: &mut dyn Sender) -> io::Result<()> {
        let position = sender.first_position()?;
        if !self.resume_from(position) {
            tracing::info!(
                joiner = self.joiner,
                "data that this joining worker needs is no longer retained"
            );
            return Ok(());
        }
        let mut caught_up_sent = false;
        loop {
            self.send_snapshot(sender)?;
            while let Some(result) = self.results.get(self.sent_results) {
                send(sender, result)?;
                self.sent_results += 1;
                caught_up_sent = false;
            }
            self.forget_applied(sender.position()?);
            match self.queue.try_recv() {
                Ok(message) => {
                    self.results.push_back(message);
                    continue;
                }
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) if caught_up_sent => {}
                Err(TryRecvError::Empty) => sender.send(KIND_CAUGHT_UP, 0, &[], &[])?,
            }
            caught_up_sent = true;
            let keepalive = KEEPALIVE_INTERVAL.min(self.idle_timeout / 4);
            match receive(&*self.machine, &self.queue, keepalive) {
                Ok(message) => self.results.push_back(message),
                Err(RecvTimeoutError::Timeout) => sender.heartbeat()?,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Sends the rest of the snapshot, from the joiner's position on.
    fn send_snapshot(&mut self, sender: &mut dyn Sender) -> io::Result<()> {
        let Some(snapshot) = self.snapshot.clone().filter(|_| self.sent_floats < self.floats)
        else {
            return Ok(());
        };
        let [parameters, slots] = snapshot.wait(&*self.machine);
        let generation = self.generation.0;
        let note = StateNote { from: self.sent_floats as u64, ..self.note.clone() };
        sender.send(KIND_STATE, generation, &header::encode(&note), &[])?;
        while self.sent_floats < self.floats {
            // No part spans both tensors.
            let (tensor, at) = match self.sent_floats.checked_sub(parameters.len()) {
                None => (parameters, self.sent_floats),
                Some(at) => (slots, at),
            };
            let part = &tensor[at..tensor.len().min(at + self.part_floats)];
            let note = PartNote { from: self.sent_floats as u64, digest: digest(part) };
            sender.send(KIND_PART, generation, &header::encode(&note), part)?;
            self.sent_floats += part.len();
        }
        Ok(())
    }

    /// Resumes at the joiner's position. `false` if the data that follows it is no longer retained.
    fn resume_from(&mut self, position: Option<Position>) -> bool {
        self.sent_results = 0;
        let of_this = position.filter(|position| position.snapshot == self.note.record.step);
        match of_this {
            Some(Position { floats, step, .. }) if floats == self.floats as u64 => {
                self.sent_floats = self.floats;
                self.snapshot = None;
                let applied =
                    self.results.iter().take_while(|result| is_before(result, step)).count();
                self.results.drain(..applied);
                self.first_step += applied as u64;
                step == self.first_step
            }
            Some(Position { floats, .. }) if floats < self.floats as u64 => {
                self.sent_floats = floats as usize;
                self.has_all()
            }
            _ => {
                self.sent_floats = 0;
                self.has_all()
            }
        }
    }

    fn has_all(&self) -> bool {
        self.snapshot.is_some() && self.first_step == self.note.record.step
    }

    /// Drops what the joiner reports as received.
    fn forget_applied(&mut self, position: Option<Position>) {
        let Some(Position { snapshot, floats, step }) = position else { return };
        if snapshot != self.note.record.step || floats != self.floats as u64 {
            return;
        }
        self.snapshot = None;
        // A joiner that never reports its position cannot resume. It occupies no more memory than
        // others.
        while self.sent_results > 0
            && self
                .results
                .front()
                .is_some_and(|r| is_before(r, step) || self.results.len() > QUEUED_RESULTS_MAX)
        {
            self.results.pop_front();
            self.sent_results -= 1;
            self.first_step += 1;
        }
    }
}

fn is_before(message: &StateMessage, step: u64) -> bool {
    matches!(message, StateMessage::Result { step: of, .. } if *of < step)
}

fn send(sender: &mut dyn Sender, message: &StateMessage) -> io::Result<()> {
    match message {
        StateMessage::End { generation } => sender.send(KIND_END, generation.0, &[], &[]),
        StateMessage::Result { generation, headers, sum, .. } => {
            sender.send(KIND_RESULT, generation.0, headers, sum)
        }
    }
}

/// Time that a transfer whose link broke waits for the joiner to reconnect.
const RETURN_WINDOW: Duration = Duration::from_secs(10);

/// Interval of heartbeats while there is nothing to send.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
