//! Handlers of events that span the workers, the group and the data: one file for each concern.

mod broken;
mod hung;
mod inference;
mod liveness;
mod onboarding;
mod publish;
mod replicas;
mod training;
