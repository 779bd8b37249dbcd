//! Limits the connections of peers that have not authenticated, or never do.

mod admission;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use self::admission::Admission;
pub(crate) use self::admission::Limits;

/// The limited connections of a listener.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionLimit(Arc<Mutex<Table>>);

/// A place among the limited connections. Its drop frees it.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: ConnectionLimit,
    id: u64,
}

/// Ends when a limited connection has to be closed, to make room for others.
pub(crate) type Evicted = oneshot::Receiver<()>;

#[derive(Debug)]
struct Table {
    admission: Admission,
    /// Dropping a sender evicts its connection.
    open: BTreeMap<u64, oneshot::Sender<()>>,
}

impl ConnectionLimit {
    pub(crate) fn new(limits: Limits) -> Self {
        let table = Table { admission: Admission::new(limits), open: BTreeMap::new() };
        Self(Arc::new(Mutex::new(table)))
    }

    /// Adds a connection of this address, for which another one may be evicted.
    pub(crate) fn admit(&self, address: IpAddr) -> (Permit, Evicted) {
        let mut table = self.lock();
        let admitted = table.admission.admit(address);
        if let Some(evicted) = admitted.evicted {
            table.open.remove(&evicted);
        }
        let (keep, evicted) = oneshot::channel();
        table.open.insert(admitted.id, keep);
        (Permit { limit: self.clone(), id: admitted.id }, evicted)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut table = self.limit.lock();
        table.admission.release(self.id);
        table.open.remove(&self.id);
    }
}
