//! A worker's group: on the host, or with a GPU at each rank.

use elasticdl_collective::device::DeviceRing;
use elasticdl_collective::{CollectiveError, Communicator, TcpRing};

/// The ring of one generation.
#[derive(Debug)]
pub(crate) enum Ring {
    Device(DeviceRing),
    Host(TcpRing),
}

impl Ring {
    /// # Errors
    /// The ranks compute on CPUs: a defect of the caller.
    pub(crate) fn device(&mut self) -> Result<&mut DeviceRing, CollectiveError> {
        match self {
            Self::Device(ring) => Ok(ring),
            Self::Host(_) => Err(CollectiveError::Invalid("this group has no GPUs".to_owned())),
        }
    }

    /// The ring on the host, below.
    pub(crate) fn host(&self) -> &TcpRing {
        match self {
            Self::Device(ring) => ring.host(),
            Self::Host(ring) => ring,
        }
    }

    fn any(&mut self) -> &mut dyn Communicator {
        match self {
            Self::Device(ring) => ring,
            Self::Host(ring) => ring,
        }
    }
}

impl Communicator for Ring {
    fn rank(&self) -> usize {
        self.host().rank()
    }

    fn world_size(&self) -> usize {
        self.host().world_size()
    }

    fn generation(&self) -> u64 {
        self.host().generation()
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.any().all_gather(mine)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.any().all_reduce(header, src, dst)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.any().broadcast_bytes(root, bytes)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.any().broadcast(root, buf)
    }
}
