//! The experiments of three papers on profiles, repeated with `elfen profile`.

pub(crate) mod hps;
pub(crate) mod profileme;
pub(crate) mod programs;
pub(crate) mod shadow;
