//! When the threads of processes run.

use super::clock::Micros;
use super::coroutine::Coroutine;
use super::state::endpoint::Ring;
use super::state::event::Event;
use super::state::network::LinkId;
use super::state::process::Process;
use super::state::thread::{Doing, TRAINER, Thread, ThreadId};
use super::state::trainer::Trainer;
use super::world::World;

impl World {
    // ---- what a thread does ----

    /// Starts a thread in `p`, which begins soon. Returns its number.
    pub(super) fn start_thread(&mut self, p: usize, body: impl FnOnce() + 'static) -> usize {
        let threads = &mut self.processes[p].threads;
        let is_free = |thread: &Thread| matches!(thread.doing, Doing::Nothing);
        let number = threads.iter().position(is_free).unwrap_or(threads.len());
        if number == threads.len() {
            threads.push(Thread::default());
        }
        threads[number].answers = 0;
        self.coroutines.insert(ThreadId { p, number }, Coroutine::new(body));
        let delay = self.thread_delay();
        self.busy(ThreadId { p, number }, Doing::Busy, delay);
        number
    }

    /// `thread` does something for some time.
    pub(super) fn busy(&mut self, thread: ThreadId, doing: Doing, span: Micros) {
        self.processes[thread.p].threads[thread.number].doing = doing;
        self.wake_after(thread, span);
    }

    /// `thread` waits for other threads of its process, until the time `until` at most.
    pub(super) fn block(&mut self, thread: ThreadId, until: Micros) {
        let is_trainer = thread.number == TRAINER;
        if until < Micros::MAX {
            self.continue_at(thread, until);
        }
        let Process { threads, trainer, .. } = &mut self.processes[thread.p];
        threads[thread.number].doing = Doing::Blocked;
        if is_trainer {
            trainer.news = 0;
        }
    }

    // ---- wake-ups ----

    /// A message has arrived in the inbox of the trainer.
    pub(super) fn wake_for_news(&mut self, p: usize) {
        if matches!(self.processes[p].threads[TRAINER].doing, Doing::Blocked | Doing::Fetching) {
            self.wake_trainer(p);
        }
    }

    /// Something has happened that the trainer may wait for.
    pub(super) fn wake_trainer(&mut self, p: usize) {
        self.wake(ThreadId { p, number: TRAINER });
    }

    /// A packet has arrived on `link`.
    pub(super) fn wake_trainer_for(&mut self, p: usize, link: LinkId) {
        let Process { threads, trainer, .. } = &self.processes[p];
        let is_waited_for = match &threads[TRAINER].doing {
            Doing::Fetching => trainer.source.as_ref().is_some_and(|source| source.link == link),
            Doing::Connecting | Doing::Operating(_) => {
                let is_ours = |ring: &Ring| ring.next == Some(link) || ring.prev == Some(link);
                trainer.ring.as_ref().is_some_and(is_ours)
            }
            Doing::Blocked | Doing::Busy | Doing::Computing | Doing::Nothing => false,
        };
        if is_waited_for {
            self.wake_trainer(p);
        }
    }

    /// Wakes a thread that waits, unless that has happened already.
    fn wake(&mut self, thread: ThreadId) {
        let Thread { woken, doing, .. } = &self.processes[thread.p].threads[thread.number];
        if !woken && !matches!(doing, Doing::Busy | Doing::Computing | Doing::Nothing) {
            let delay = self.thread_delay();
            self.wake_after(thread, delay);
        }
    }

    fn wake_after(&mut self, thread: ThreadId, delay: Micros) {
        self.processes[thread.p].threads[thread.number].woken = true;
        self.continue_at(thread, self.clock.now() + delay);
    }

    /// Continues `thread` at `moment`, unless it is continued earlier.
    pub(super) fn continue_at(&mut self, thread: ThreadId, moment: Micros) {
        let ticket = self.processes[thread.p].threads[thread.number].ticket;
        self.clock.at(moment, Event::Thread { thread, ticket });
    }

    // ---- running ----

    pub(super) fn on_thread(&mut self, thread: ThreadId, ticket: u32) {
        let ThreadId { p, number } = thread;
        let Process { threads, trainer, .. } = &mut self.processes[p];
        let Thread { ticket: counts, woken, .. } = &mut threads[number];
        if *counts != ticket || (trainer.is_hung && number == TRAINER) {
            return;
        }
        *counts += 1;
        *woken = false;
        self.run_thread(thread);
        if number == TRAINER {
            self.take_outbox(p);
            // It may have sent something to its donors, or dropped them.
            for number in TRAINER + 1..self.processes[p].threads.len() {
                if matches!(self.processes[p].threads[number].doing, Doing::Blocked) {
                    self.wake(ThreadId { p, number });
                }
            }
        } else if matches!(self.processes[p].threads[number].doing, Doing::Nothing) {
            // It may have copied the state, which the trainer waits for.
            self.wake_for_news(p);
        }
    }

    fn run_thread(&mut self, thread: ThreadId) {
        let Some(mut coroutine) = self.coroutines.remove(&thread) else { return };
        loop {
            let Some(mut request) = coroutine.next_request(self.clock.now()) else {
                self.processes[thread.p].threads[thread.number].doing = Doing::Nothing;
                return;
            };
            if !request(self, thread) {
                coroutine.keep(request);
                self.coroutines.insert(thread, coroutine);
                return;
            }
            self.processes[thread.p].threads[thread.number].answers += 1;
        }
    }

    /// Passes on what the trainer has sent to the master.
    fn take_outbox(&mut self, p: usize) {
        let Process { trainer: Trainer { outbox: Some(from), .. }, outbox, .. } =
            &mut self.processes[p]
        else {
            return;
        };
        let before = outbox.len();
        while let Ok(message) = from.try_recv() {
            outbox.push_back(message);
        }
        if outbox.len() > before {
            self.wake_control(p);
        }
    }

    /// Ends the threads of a process that has ended.
    pub(super) fn end_threads(&mut self, p: usize) {
        for (number, thread) in self.processes[p].threads.iter_mut().enumerate() {
            thread.doing = Doing::Nothing;
            self.coroutines.remove(&ThreadId { p, number });
        }
    }
}
