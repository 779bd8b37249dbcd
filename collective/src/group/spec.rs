//! Who the members of a generation are, and at which addresses.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::CollectiveError;

/// Members of the group of one generation, in ring order: a member's rank is its index.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GroupSpec {
    /// Incremented with every change of membership.
    pub generation: u64,
    /// Members of the group: at least one, at most [`MEMBERS_MAX`]. Ids are distinct, and the
    /// caller's own id is among them.
    pub members: Vec<Member>,
}

impl GroupSpec {
    pub(crate) fn rank_of(&self, id: u64) -> Result<usize, CollectiveError> {
        let world = self.members.len();
        if world > MEMBERS_MAX {
            let reason = format!("a group of {world} members; the limit is {MEMBERS_MAX}");
            return Err(CollectiveError::Invalid(reason));
        }
        let ids: BTreeSet<u64> = self.members.iter().map(|member| member.id).collect();
        if ids.len() < world {
            return Err(CollectiveError::Invalid(
                "a worker is in the group more than once".to_owned(),
            ));
        }
        self.members.iter().position(|member| member.id == id).ok_or_else(|| {
            CollectiveError::Invalid(format!(
                "worker {id} is not in the group of generation {}",
                self.generation
            ))
        })
    }
}

/// One member of a group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Member {
    /// Id of one incarnation of a worker; never reused.
    pub id: u64,
    /// Address on which the member's [`Endpoint`](crate::Endpoint) listens.
    pub address: SocketAddr,
}

/// Maximum number of members.
pub const MEMBERS_MAX: usize = 16_384;
