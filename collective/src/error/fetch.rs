//! Why a joiner gets no link to a donor.

use std::io;
use std::time::Duration;

/// Why a donor could not be dialled for its state. Another member may be a donor too.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The donor did not answer in time.
    #[error("worker {member} did not answer within {waited:?}")]
    Deadline {
        /// Id of the donor.
        member: u64,
        /// Limit that the caller passed.
        waited: Duration,
    },
    /// The link to the donor ended or could not be made.
    #[error("lost worker {member}")]
    Lost {
        /// Id of the donor.
        member: u64,
        /// Error of the link.
        #[source]
        source: io::Error,
    },
    /// The operating system refused a thread for the reports of this worker's position.
    #[error("cannot start the reporter thread of a fetch")]
    Thread {
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The program that answers at the donor's address did not prove that it knows the job's
    /// secret, and was sent nothing.
    #[error(
        "worker {member} did not prove that it knows the job's secret: is another program \
         listening at its address?"
    )]
    Unauthenticated {
        /// Id of the donor.
        member: u64,
    },
}
