use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::CollectiveError;
use crate::handshake::Purpose;
use crate::notifier::Notifier;
use crate::pending_dials::{DialKey, PendingDials};

/// Ends everything older than a generation, at once, from any thread. All clones are one fence.
///
/// **Invariant:** generations are compared here and nowhere else; frames are only checked for being
/// of their link's.
///
/// **Invariant:** what is ended is marked before its sockets are shut down and its bell is rung,
/// under the lock under which links are registered and handed over. No wake-up is lost, whatever
/// the other side is about to do.
#[derive(Clone, Debug)]
pub struct Fence {
    state: Arc<Mutex<State>>,
}

impl Fence {
    /// Makes every `connect` and every operation of a generation below `generation` return
    /// [`CollectiveError::Aborted`], those in progress and those to come, and shuts down their
    /// links, so that peers hear of it. Never blocks. Lowering the fence again is not possible.
    pub fn abort_before(&self, generation: u64) {
        let mut state = self.lock();
        state.floor = state.floor.max(generation);
        let floor = state.floor;
        state.pending_dials.drop_before(floor);
        if floor == u64::MAX {
            state.watched.iter().filter_map(Weak::upgrade).for_each(|link| shut_down(&link));
        }
        for entry in state.entries.values().filter(|entry| entry.generation < floor) {
            entry.signal.aborted.store(true, Ordering::Release);
            entry.shut_down();
            entry.signal.notifier.notify();
        }
    }

    pub(crate) fn new() -> Self {
        let state = State {
            floor: 0,
            newest: 0,
            taken: Vec::new(),
            pending_dials: PendingDials::new(),
            entries: BTreeMap::new(),
            watched: Vec::new(),
            entries_ever: 0,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Begins to build a group. From now on dials of older generations are refused.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`], if the fence is above `generation` or a newer group has been
    /// begun; [`CollectiveError::Io`].
    pub(crate) fn register(&self, generation: u64) -> Result<GroupRegistration, CollectiveError> {
        let notifier = Notifier::new().map_err(|errno| CollectiveError::Io {
            action: "create an event descriptor",
            source: errno.into(),
        })?;
        let signal = Arc::new(Signal { aborted: AtomicBool::new(false), notifier });
        let mut state = self.lock();
        if generation < state.oldest_admitted() {
            return Err(CollectiveError::Aborted { generation });
        }
        state.newest = generation;
        state.pending_dials.drop_before(generation);
        state.taken.retain(|key| key.generation >= generation);
        let id = state.entries_ever;
        state.entries_ever += 1;
        state.entries.insert(id, Entry { generation, links: Vec::new(), signal: signal.clone() });
        Ok(GroupRegistration { fence: self.clone(), id, generation, signal })
    }

    /// Has `link`, which is of no generation, shut down when everything is over: when the fence is
    /// raised above all generations.
    pub(crate) fn watch(&self, link: &Arc<TcpStream>) {
        let mut state = self.lock();
        state.watched.retain(|link| link.strong_count() > 0);
        if state.floor == u64::MAX {
            shut_down(link);
        }
        state.watched.push(Arc::downgrade(link));
    }

    /// Takes in a proven dial, for whoever builds that generation now or later.
    pub(crate) fn admit(
        &self,
        key: DialKey,
        link: TcpStream,
        now: Duration,
    ) -> Result<(), Refusal> {
        let mut state = self.lock();
        if key.generation < state.oldest_admitted() {
            return Err(Refusal::Old);
        }
        if state.taken.contains(&key) {
            return Err(Refusal::Duplicate);
        }
        state.pending_dials.insert(key, link, now);
        for entry in state.entries.values().filter(|entry| entry.generation == key.generation) {
            entry.signal.notifier.notify();
        }
        Ok(())
    }

    /// Drops dials that nobody came for, and says when to come back.
    pub(crate) fn expire(&self, now: Duration) -> Option<Duration> {
        self.lock().pending_dials.expire(now)
    }

    /// The number of groups that are being built or in use.
    #[cfg(test)]
    pub(crate) fn groups(&self) -> usize {
        self.lock().entries.len()
    }

    /// The number of dials that wait.
    #[cfg(test)]
    pub(crate) fn pending_dial_count(&self) -> usize {
        self.lock().pending_dials.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing under this lock panics")
    }
}

/// Why a proven dial is not taken in.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("this member has a link in this generation already")]
    Duplicate,
    #[error("its generation is over")]
    Old,
}

/// One group's registration with the fence, from the first dial to the last byte.
#[derive(Debug)]
pub(crate) struct GroupRegistration {
    fence: Fence,
    id: u64,
    generation: u64,
    signal: Arc<Signal>,
}

impl GroupRegistration {
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Rings when the pass is aborted or a dial of its generation has come in.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.signal.notifier
    }

    /// # Errors
    /// [`CollectiveError::Aborted`].
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        if self.signal.aborted.load(Ordering::Acquire) {
            return Err(CollectiveError::Aborted { generation: self.generation });
        }
        Ok(())
    }

    /// Has `link` shut down when the pass is aborted. If it has been already, so is the link.
    pub(crate) fn register_link(&self, link: &Arc<TcpStream>) {
        let mut state = self.fence.lock();
        if self.signal.aborted.load(Ordering::Acquire) {
            shut_down(link);
        }
        let entry = state.entries.get_mut(&self.id).expect("the entry lives as long as its pass");
        entry.links.push(link.clone());
    }

    /// The dial of `member` in this generation, if it has come in.
    pub(crate) fn take(&self, member: u64, purpose: Purpose) -> Option<TcpStream> {
        let key = DialKey { generation: self.generation, member, purpose };
        let mut state = self.fence.lock();
        let link = state.pending_dials.take(key)?;
        state.taken.push(key);
        Some(link)
    }

    /// Shuts down the links: the neighbours hear of it even if nobody reads or writes.
    pub(crate) fn shut_down(&self) {
        if let Some(entry) = self.fence.lock().entries.get(&self.id) {
            entry.shut_down();
        }
    }
}

impl Drop for GroupRegistration {
    fn drop(&mut self) {
        self.fence.lock().entries.remove(&self.id);
    }
}

#[derive(Debug)]
struct State {
    /// What is below is over.
    floor: u64,
    /// The newest generation that a group was begun for.
    newest: u64,
    /// The dials of the newest generation that were handed over.
    taken: Vec<DialKey>,
    pending_dials: PendingDials<TcpStream>,
    entries: BTreeMap<u64, Entry>,
    watched: Vec<Weak<TcpStream>>,
    entries_ever: u64,
}

impl State {
    fn oldest_admitted(&self) -> u64 {
        self.floor.max(self.newest)
    }
}

#[derive(Debug)]
struct Entry {
    generation: u64,
    links: Vec<Arc<TcpStream>>,
    signal: Arc<Signal>,
}

impl Entry {
    fn shut_down(&self) {
        self.links.iter().for_each(|link| shut_down(link));
    }
}

#[derive(Debug)]
struct Signal {
    aborted: AtomicBool,
    notifier: Notifier,
}

fn shut_down(link: &TcpStream) {
    // A link that the peer has reset is down already.
    let _: io::Result<()> = link.shutdown(Shutdown::Both);
}
