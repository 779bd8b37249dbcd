//! The list of a group's members.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::WorkerId;

/// The members of a group in ring order, with the addresses at which peers reach them. Clones share
/// the list: a membership of ten thousand workers is sent to each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members(Arc<[(WorkerId, SocketAddr)]>);

impl Default for Members {
    fn default() -> Self {
        Self(Arc::from([]))
    }
}

impl Deref for Members {
    type Target = [(WorkerId, SocketAddr)];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl From<Vec<(WorkerId, SocketAddr)>> for Members {
    fn from(members: Vec<(WorkerId, SocketAddr)>) -> Self {
        Self(members.into())
    }
}

impl FromIterator<(WorkerId, SocketAddr)> for Members {
    fn from_iter<I: IntoIterator<Item = (WorkerId, SocketAddr)>>(members: I) -> Self {
        Self(members.into_iter().collect())
    }
}

impl<'a> IntoIterator for &'a Members {
    type Item = &'a (WorkerId, SocketAddr);
    type IntoIter = std::slice::Iter<'a, (WorkerId, SocketAddr)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}
