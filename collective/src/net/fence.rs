//! Ends groups of older generations from any thread, and holds the dials that wait for a newer one.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::admission::{Admission, DialKey, Refusal};
use super::handshake::Purpose;
use super::link::Link;
use super::notifier::Notifier;
use crate::CollectiveError;

/// Fencing of old generations: aborts, from any thread and at once, all groups older than a given
/// generation. Clones share one fence.
///
/// **Invariant:** a group is marked as aborted before its sockets are shut down and its notifier is
/// set, under the lock under which links are registered and handed over. So no wake-up is lost,
/// whatever the other thread is about to do.
#[derive(Clone, Debug)]
pub struct Fence {
    state: Arc<Mutex<State>>,
}

impl Fence {
    /// Makes every current and future `connect` and operation of a generation below `generation`
    /// return [`CollectiveError::Aborted`], and shuts down their links, so that the peers detect
    /// it. Never blocks. The fence cannot be lowered again.
    pub fn abort_before(&self, generation: u64) {
        let mut state = self.lock();
        // A link that is dropped is closed.
        state.admission.abort_before(generation);
        if state.admission.is_closed() {
            state.watched.iter().filter_map(Weak::upgrade).for_each(|link| shut_down(&link));
        }
        let State { admission, entries, .. } = &*state;
        for entry in entries.values().filter(|entry| admission.is_aborted(entry.generation)) {
            entry.signal.aborted.store(true, Ordering::Release);
            entry.shut_down();
            entry.signal.notifier.notify();
        }
    }

    pub(crate) fn new() -> Self {
        let state = State {
            admission: Admission::default(),
            entries: BTreeMap::new(),
            watched: Vec::new(),
            entries_ever: 0,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Registers a group that is about to be built. From now on dials of older generations are
    /// refused.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`] if the fence is above `generation` or a newer group is
    /// registered; [`CollectiveError::Io`].
    pub(crate) fn register(&self, generation: u64) -> Result<GroupRegistration, CollectiveError> {
        let notifier = Notifier::new().map_err(|errno| CollectiveError::Io {
            action: "create an event descriptor",
            source: errno.into(),
        })?;
        let signal = Arc::new(Signal { aborted: AtomicBool::new(false), notifier });
        let mut state = self.lock();
        let begun = state.admission.begin(generation);
        begun.map_err(|_| CollectiveError::Aborted { generation })?;
        let id = state.entries_ever;
        state.entries_ever += 1;
        state.entries.insert(id, Entry { generation, links: Vec::new(), signal: signal.clone() });
        Ok(GroupRegistration { fence: self.clone(), id, generation, signal })
    }

    /// Registers a link that belongs to no generation. It is shut down when the fence is raised
    /// above all generations.
    pub(crate) fn watch(&self, link: &Arc<Link>) {
        let mut state = self.lock();
        state.watched.retain(|link| link.strong_count() > 0);
        if state.admission.is_closed() {
            shut_down(link);
        }
        state.watched.push(Arc::downgrade(link));
    }

    /// Checks that dials of `generation` are not too old.
    ///
    /// # Errors
    /// [`Refusal::TooOld`].
    pub(crate) fn check(&self, generation: u64) -> Result<(), Refusal> {
        self.lock().admission.check(generation)
    }

    /// Stores an authenticated dial until its generation is built.
    pub(crate) fn admit(&self, key: DialKey, link: Link, now: Duration) -> Result<(), Refusal> {
        let mut state = self.lock();
        state.admission.admit(key, link, now)?;
        for entry in state.entries.values().filter(|entry| entry.generation == key.generation) {
            entry.signal.notifier.notify();
        }
        Ok(())
    }

    /// Drops expired dials, and returns when the next one expires.
    pub(crate) fn expire(&self, now: Duration) -> Option<Duration> {
        let mut state = self.lock();
        state.admission.expire(now);
        state.admission.next_expiry()
    }

    /// Number of groups that are being built or in use.
    #[cfg(test)]
    pub(crate) fn groups(&self) -> usize {
        self.lock().entries.len()
    }

    /// Number of pending dials.
    #[cfg(test)]
    pub(crate) fn pending_dial_count(&self) -> usize {
        self.lock().admission.pending()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing under this lock panics")
    }
}

/// Registration of one group with the fence, from the first dial to the last operation.
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

    /// Notifier that is set when the group is aborted or a dial of its generation arrives.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.signal.notifier
    }

    /// Checks that the group is not aborted.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`].
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        if self.signal.aborted.load(Ordering::Acquire) {
            return Err(CollectiveError::Aborted { generation: self.generation });
        }
        Ok(())
    }

    /// Registers a link of the group, to be shut down when the group is aborted. If the group is
    /// aborted already, the link is shut down now.
    pub(crate) fn register_link(&self, link: &Arc<Link>) {
        let mut state = self.fence.lock();
        if self.signal.aborted.load(Ordering::Acquire) {
            shut_down(link);
        }
        let entry =
            state.entries.get_mut(&self.id).expect("the entry lives as long as its registration");
        entry.links.push(link.clone());
    }

    /// Takes the dial of `member` in this generation, if it has arrived.
    pub(crate) fn take(&self, member: u64, purpose: Purpose) -> Option<Link> {
        let key = DialKey { generation: self.generation, member, purpose };
        self.fence.lock().admission.take(key)
    }

    /// Shuts down the links. The neighbours detect it even if this rank neither reads nor writes.
    pub(crate) fn shut_down(&self) {
        let mut state = self.fence.lock();
        state.admission.end_pairs(self.generation);
        if let Some(entry) = state.entries.get(&self.id) {
            entry.shut_down();
        }
    }
}

impl Drop for GroupRegistration {
    fn drop(&mut self) {
        let mut state = self.fence.lock();
        state.admission.end_pairs(self.generation);
        state.entries.remove(&self.id);
    }
}

#[derive(Debug)]
struct State {
    admission: Admission<Link>,
    entries: BTreeMap<u64, Entry>,
    watched: Vec<Weak<Link>>,
    entries_ever: u64,
}

#[derive(Debug)]
struct Entry {
    generation: u64,
    links: Vec<Arc<Link>>,
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

fn shut_down(link: &Link) {
    // A link that the peer has reset is already down.
    let _: io::Result<()> = link.shutdown(Shutdown::Both);
}
