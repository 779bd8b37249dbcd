use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;

use crate::CollectiveError;

/// The two links of a rank in a ring.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) next: Neighbour,
    pub(crate) prev: Neighbour,
}

/// A neighbour and the link to or from it.
#[derive(Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: usize,
    pub(crate) member: u64,
    pub(crate) link: Arc<TcpStream>,
}

/// Fault of a link.
#[derive(Debug)]
pub(crate) enum LinkFault {
    Broken(String),
    Lost(io::Error),
}

impl Neighbour {
    /// Returns the error of an operation that this fault of the neighbour's link has ended.
    pub(crate) fn error(&self, fault: LinkFault) -> CollectiveError {
        let Self { rank, member, .. } = *self;
        match fault {
            LinkFault::Broken(reason) => CollectiveError::Protocol { rank, member, reason },
            LinkFault::Lost(source) => CollectiveError::PeerLost { rank, member, source },
        }
    }
}

/// Checks a link on which no data is expected: a read returns its end, or a protocol violation.
pub(crate) fn check_idle_link(mut link: &TcpStream) -> Result<(), LinkFault> {
    Err(match link.read(&mut [0]) {
        Ok(0) => LinkFault::Lost(ErrorKind::UnexpectedEof.into()),
        Ok(_) => LinkFault::Broken("expected no data on the link to it, got bytes".to_owned()),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
            return Ok(());
        }
        Err(error) => LinkFault::Lost(error),
    })
}
