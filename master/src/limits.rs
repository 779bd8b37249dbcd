//! Upper bounds on what a master accepts from outside.

use std::time::Duration;

pub use elasticdl_proto::limits::*;

/// Time within which a connection must authenticate.
pub(crate) const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(5);
