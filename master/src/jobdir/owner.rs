//! Whether the directory of a job is still that of the job: a user can remove or rename it while
//! the job runs, and start another one of its name.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::TOKEN;
use crate::token::Token;

/// The job that has a directory, known by its token.
#[derive(Clone, Debug)]
pub struct Owner {
    path: PathBuf,
    token: Option<Token>,
}

impl Owner {
    /// The job that now has the directory `root`.
    #[must_use]
    pub fn of(root: &Path) -> Self {
        let path = root.join(TOKEN);
        Self { token: token_in(&path), path }
    }

    /// Whether another job now runs, or has ended, in the directory: its files are not this job's.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        let hex = |token: &Token| token.to_hex();
        let found = token_in(&self.path).as_ref().map(hex);
        found.is_some() && found != self.token.as_ref().map(hex)
    }
}

fn token_in(path: &Path) -> Option<Token> {
    Token::from_hex(&fs::read_to_string(path).ok()?)
}
