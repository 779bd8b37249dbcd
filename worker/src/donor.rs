//! Serves newcomers: copies of the state, and every step's result after it, beside the training.
//!
//! ```text
//!   trainer ── buffers, shared ──► one thread per newcomer ── parcels ──► newcomer
//! ```
//!
//! **Invariant:** the trainer never waits for a newcomer. It shares its buffers, which are only read until the next update;
//! a thread that has not copied them by then keeps the old ones, and the trainer goes on with copies of its own.
//! **Invariant:** a newcomer that is too slow is dropped: no more than [`AHEAD_BYTES`] of results wait for it, or few of
//! them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use elasticdl_collective::{StateSender, Visitor};
use elasticdl_proto::Generation;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::core::header;
use crate::core::header::{StateRecord, StepHeader};

/// The newcomers that this worker serves.
#[derive(Debug)]
pub(crate) struct Donor {
    fetchers: Vec<Fetcher>,
    patience: Duration,
}

#[derive(Debug)]
struct Fetcher {
    member: u64,
    parcels: SyncSender<Parcel>,
}

/// What newcomers are sent. Steps are those of the donor's group of `generation`.
#[derive(Clone, Debug)]
enum Parcel {
    /// The donor goes into this generation, and the newcomer with it.
    End {
        generation: Generation,
    },
    Result {
        generation: Generation,
        headers: Arc<Vec<u8>>,
        sum: Arc<Vec<f32>>,
    },
    State {
        generation: Generation,
        record: StateRecord,
        parameters: Arc<Vec<f32>>,
        slots: Arc<Vec<f32>>,
    },
}

impl Donor {
    /// `patience`: how long a newcomer may take nothing.
    pub(crate) fn new(patience: Duration) -> Self {
        Self { fetchers: Vec::new(), patience }
    }

    /// Begins to serve a newcomer with the state as it is now.
    pub(crate) fn serve(
        &mut self,
        visitor: Visitor,
        generation: Generation,
        record: &StateRecord,
        parameters: &Arc<Vec<f32>>,
        slots: &Arc<Vec<f32>>,
    ) {
        let member = visitor.member();
        let results = AHEAD_BYTES / (parameters.len() * size_of::<f32>()).max(1);
        let (parcels, queue) = sync_channel(results.clamp(AHEAD_MIN, AHEAD_MAX));
        let state = Parcel::State {
            generation,
            record: record.clone(),
            parameters: Arc::clone(parameters),
            slots: Arc::clone(slots),
        };
        let patience = self.patience;
        let sender = visitor.serve(patience);
        let thread = std::thread::Builder::new()
            .name("donor".into())
            .spawn(move || deliver(sender, &queue, patience, member));
        match thread {
            Ok(_) => {
                tracing::info!(newcomer = member, step = record.step, "a newcomer fetches the state");
                parcels.try_send(state).expect("the queue is empty, and its thread waits for it");
                self.fetchers.retain(|other| other.member != member);
                self.fetchers.push(Fetcher { member, parcels });
            }
            Err(error) => tracing::warn!(%error, "no thread to serve a newcomer"),
        }
    }

    /// Whether there are newcomers that want to know of the next step.
    pub(crate) fn is_serving(&self) -> bool {
        !self.fetchers.is_empty()
    }

    /// A step was committed by the group of `generation`; its reduced gradient is `sum`.
    pub(crate) fn committed(&mut self, generation: Generation, headers: &[StepHeader], sum: &Arc<Vec<f32>>) {
        if self.is_serving() {
            let headers = Arc::new(header::encode(&headers.to_vec()));
            let result = Parcel::Result { generation, headers, sum: Arc::clone(sum) };
            self.fetchers.retain(|fetcher| fetcher.send(result.clone()));
        }
    }

    /// This worker goes into `generation`. Newcomers that are in it too have got everything; the others follow it.
    pub(crate) fn switch(&mut self, generation: Generation, is_member: impl Fn(u64) -> bool) {
        self.fetchers.retain(|fetcher| match is_member(fetcher.member) {
            true => {
                fetcher.send(Parcel::End { generation });
                false
            }
            false => true,
        });
    }

    /// This worker makes no more steps.
    pub(crate) fn dismiss(&mut self) {
        self.fetchers.clear();
    }
}

impl Fetcher {
    /// Whether it is to be served on.
    fn send(&self, parcel: Parcel) -> bool {
        match self.parcels.try_send(parcel) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                tracing::info!(
                    newcomer = self.member,
                    "a newcomer is slower than the group; it has to begin again"
                );
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// Sends what is in the queue until it is closed, or the link is.
fn deliver(mut sender: StateSender, queue: &Receiver<Parcel>, patience: Duration, newcomer: u64) {
    loop {
        let sent = match queue.recv_timeout(patience / 4) {
            Ok(parcel) => send_all(&mut sender, parcel, queue),
            Err(RecvTimeoutError::Timeout) => sender.beat(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(error) = sent {
            tracing::info!(newcomer, %error, "a newcomer is gone");
            return;
        }
    }
}

/// Sends `parcel` and all that wait behind it, and that these were all.
fn send_all(sender: &mut StateSender, parcel: Parcel, queue: &Receiver<Parcel>) -> std::io::Result<()> {
    let mut next = Some(parcel);
    while let Some(parcel) = next {
        send(sender, parcel)?;
        next = queue.try_recv().ok();
    }
    sender.send(KIND_TIP, 0, &[], &[])
}

fn send(sender: &mut StateSender, parcel: Parcel) -> std::io::Result<()> {
    match parcel {
        Parcel::End { generation } => sender.send(KIND_END, generation.0, &[], &[]),
        Parcel::Result { generation, headers, sum } => {
            sender.send(KIND_RESULT, generation.0, &headers, &[&sum])
        }
        Parcel::State { generation, record, parameters, slots } => {
            // The trainer wants its buffers back.
            let (parameters, slots) = {
                let copy = (parameters.to_vec(), slots.to_vec());
                drop((parameters, slots));
                copy
            };
            let note = header::encode(&StateNote { record, digest: digest(&parameters, &slots) });
            sender.send(KIND_STATE, generation.0, &note, &[&parameters, &slots])
        }
    }
}

/// What comes with a state's tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StateNote {
    pub(crate) record: StateRecord,
    /// [`digest`] of the tensors.
    pub(crate) digest: u64,
}

/// Digest of a state's tensors: what a newcomer has got is what the donor has.
pub(crate) fn digest(parameters: &[f32], slots: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(parameters)) ^ xxh3_64(bytemuck::cast_slice(slots)).rotate_left(1)
}

/// The step's headers, and its reduced gradient.
pub(crate) const KIND_RESULT: u32 = 2;
/// A [`StateNote`], and the tensors: parameters, then slots.
pub(crate) const KIND_STATE: u32 = 1;
/// There is no more; the generation is the one to meet in.
pub(crate) const KIND_END: u32 = 4;
/// There is no more for now.
pub(crate) const KIND_TIP: u32 = 3;

/// Results that may wait for a newcomer, in bytes.
const AHEAD_BYTES: usize = 512 << 20;
/// Even where each of them is larger than that.
const AHEAD_MIN: usize = 3;
const AHEAD_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Instant;

    use elasticdl_collective::{Endpoint, Member, ParcelHead, Secret, StateReceiver};
    use elasticdl_proto::RecordRange;

    use super::*;

    /// Far beyond what anything here takes; only a hang gets there.
    const WATCHDOG: Duration = Duration::from_secs(60);

    const LEN: usize = 1000;

    fn record() -> StateRecord {
        let ranges = vec![RecordRange { epoch: 0, start: 0, end: 8 }];
        StateRecord {
            step: 2,
            records_trained: 8,
            epochs_complete: 0,
            ranges,
            repeated: 0,
            evaluation: Default::default(),
        }
    }

    /// A donor that serves worker 2 the state of ones and twos, and the newcomer's end.
    fn serving(donor: &mut Donor, len: usize) -> (StateReceiver, [Endpoint; 2]) {
        let endpoint = |id| {
            Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), "job", id, Secret::new("open sesame"))
                .expect("loopback has free ports")
        };
        let ends = [endpoint(1), endpoint(2)];
        let member = Member { id: 1, address: ends[0].address() };
        let source = ends[1].fetch(member, WATCHDOG, WATCHDOG).expect("the donor listens");
        let until = Instant::now() + WATCHDOG;
        let visitor = loop {
            assert!(Instant::now() < until, "the visitor never shows up");
            if let Some(visitor) = ends[0].visitor() {
                break visitor;
            }
            std::thread::yield_now();
        };
        let (parameters, slots) = (Arc::new(vec![1.0; len]), Arc::new(vec![2.0; len]));
        donor.serve(visitor, Generation(3), &record(), &parameters, &slots);
        (source, ends)
    }

    fn next(source: &mut StateReceiver) -> (ParcelHead, Vec<f32>) {
        let head = source.next(WATCHDOG).unwrap().expect("there is more");
        let mut floats = vec![0.0; head.floats as usize];
        source.take(&mut floats).unwrap();
        (head, floats)
    }

    #[test]
    fn a_newcomer_gets_the_state_then_each_result_and_the_end_when_it_is_taken_in() {
        let mut donor = Donor::new(WATCHDOG);
        let (mut source, _ends) = serving(&mut donor, LEN);
        let (head, floats) = next(&mut source);
        assert_eq!((head.kind, head.generation), (KIND_STATE, 3));
        let note: StateNote = header::decode(&head.note).unwrap();
        let (parameters, slots) = floats.split_at(LEN);
        assert_eq!((parameters, slots), (&[1.0; LEN][..], &[2.0; LEN][..]));
        assert_eq!(note, StateNote { record: record(), digest: digest(parameters, slots) });
        assert_ne!(note.digest, digest(slots, parameters));
        assert_eq!(next(&mut source).0.kind, KIND_TIP);
        donor.committed(Generation(3), &[], &Arc::new(vec![5.0; LEN]));
        let (head, floats) = next(&mut source);
        assert_eq!((head.kind, head.generation, floats), (KIND_RESULT, 3, vec![5.0; LEN]));
        assert_eq!(next(&mut source).0.kind, KIND_TIP);
        // A change without the newcomer changes nothing for it.
        donor.switch(Generation(4), |id| id == 1);
        donor.committed(Generation(4), &[], &Arc::new(vec![6.0; LEN]));
        assert_eq!((next(&mut source).0.generation, next(&mut source).0.kind), (4, KIND_TIP));
        donor.switch(Generation(5), |_| true);
        assert_eq!((next(&mut source).0.kind, donor.fetchers.len()), (KIND_END, 0));
    }

    #[test]
    fn a_newcomer_that_is_too_slow_is_dropped_and_holds_no_more_than_its_share() {
        let mut donor = Donor::new(WATCHDOG);
        // More than the sockets hold, so that the thread is stuck in the state.
        let (mut source, _ends) = serving(&mut donor, 4 << 20);
        let sum = Arc::new(Vec::new());
        let most = AHEAD_BYTES / (16 << 20) + 1;
        for _ in 0..=most {
            donor.committed(Generation(3), &[], &sum);
        }
        assert_eq!(donor.fetchers.len(), 0);
        assert!(Arc::strong_count(&sum) <= most + 1);
        // What it had been promised still comes; then the link ends, without a word of an end.
        let mut kinds = Vec::new();
        while let Ok(Some(head)) = source.next(WATCHDOG) {
            let mut floats = vec![0.0; head.floats as usize];
            source.take(&mut floats).unwrap();
            kinds.push(head.kind);
        }
        assert!(kinds.starts_with(&[KIND_STATE, KIND_RESULT]) && !kinds.contains(&KIND_END), "{kinds:?}");
    }

    #[test]
    fn the_trainer_gets_its_buffers_back() {
        let mut donor = Donor::new(WATCHDOG);
        let (mut source, ends) = serving(&mut donor, LEN);
        next(&mut source);
        let parameters = Arc::new(vec![1.0; LEN]);
        let until = Instant::now() + WATCHDOG;
        let again = ends[1].fetch(Member { id: 1, address: ends[0].address() }, WATCHDOG, WATCHDOG);
        let visitor = loop {
            assert!(Instant::now() < until, "the visitor never shows up");
            if let Some(visitor) = ends[0].visitor() {
                break visitor;
            }
            std::thread::yield_now();
        };
        donor.serve(visitor, Generation(3), &record(), &parameters, &Arc::new(Vec::new()));
        assert_eq!(next(&mut again.unwrap()).1, [1.0; LEN]);
        assert_eq!(Arc::strong_count(&parameters), 1);
        assert_eq!(donor.fetchers.len(), 1, "who comes again is served once");
    }
}
